"""What can go wrong at the gateway's door, as one tree: each error knows its HTTP status and its OpenAI error shape.

Raised anywhere below the routes and turned into a response in one place, so every refusal says what to do.
"""

from __future__ import annotations

from typing import Any


class GatewayRefusal(Exception):
    """A request that cannot be served. `status` is the HTTP status, `kind` OpenAI's error type, `code` is stable."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, Any]:
        """The OpenAI-shaped error body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class BadRequest(GatewayRefusal):
    """The body is wrong; the message names the field."""


class Unauthorized(GatewayRefusal):
    """No key, or one that opens nothing."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"


class NotFound(GatewayRefusal):
    """No such session, rollout, lease or policy."""

    status, code = 404, "not_found"


class Gone(GatewayRefusal):
    """The session is closed."""

    status, code = 410, "session_closed"


class Conflict(GatewayRefusal):
    """The state does not allow it (a stale lease, a different second finish)."""

    status, code = 409, "conflict"


class TooLarge(GatewayRefusal):
    """The body exceeds the limit."""

    status, code = 413, "body_too_large"


class TooSlow(GatewayRefusal):
    """The request did not arrive in time."""

    status, code = 408, "request_timeout"


class HeadTooLarge(GatewayRefusal):
    """The request's line and headers exceed the limit."""

    status, code = 431, "headers_too_large"


class Misdirected(GatewayRefusal):
    """The Host header names a server that this one is not."""

    status, code = 421, "unknown_host"


class TooMany(GatewayRefusal):
    """More at once than the session or the gateway allows."""

    status, kind, code = 429, "rate_limit_error", "too_many_requests"


class EngineTrouble(GatewayRefusal):
    """The engine refused, failed or is away."""

    status, kind, code = 502, "api_error", "engine_error"


class EngineAway(EngineTrouble):
    """No engine can take the turn now."""

    status, code = 503, "engine_unavailable"


class Draining(GatewayRefusal):
    """The gateway is ending."""

    status, kind, code, retry_after_s = 503, "api_error", "draining", 5


class WorkerAway(GatewayRefusal):
    """The gateway process that has the session did not answer; it is being restarted."""

    status, kind, code = 503, "api_error", "worker_unavailable"


class StoreTrouble(GatewayRefusal):
    """The turn cannot be kept, so it is not served."""

    status, kind, code = 507, "api_error", "store_full"


class MissingExtra(GatewayRefusal):
    """A setting needs a package that is not installed; the gateway does not start."""

    status, kind, code = 500, "api_error", "missing_extra"


class Failed(GatewayRefusal):
    """A fault of the gateway itself."""

    status, kind, code = 500, "api_error", "gateway_error"
