"""Errors of an engine, one tree: what was refused, what could not be reached, what broke midway.

The request path decides by class: refuse to the agent, try another replica, or re-submit what was sampled so far.
"""

from __future__ import annotations


class EngineError(RuntimeError):
    """Base of everything this package raises."""


class EngineRefused(EngineError):
    """The engine answered 4xx: the request is at fault. `code` is vLLM's error type."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class ContextOverflow(EngineRefused):
    """The prompt, or the prompt and one more token, does not fit the engine's context."""


class EngineUnavailable(EngineError):
    """No connection, no answer in time, or 5xx before the first token: another replica may do."""


class EngineBusy(EngineUnavailable):
    """Every engine that could take the turn is full, for as long as a turn may wait: ask again later."""


class EngineFault(EngineError):
    """A stream broke after it began: an `error` object, an early end, or something that is not the wire.

    Tokens received before stay valid: re-submit the prompt and those tokens to go on.
    """
