"""The gateway's administration client: what runners and trainers use, over HTTP only.

Small on purpose: one method an endpoint, pydantic in and out, one error type. It never touches the store.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar
from urllib.parse import urlencode

import httpx
from pydantic import BaseModel

from turngate.proxy import wire

M = TypeVar("M", bound=BaseModel)


class GatewayError(RuntimeError):
    """The gateway refused or could not be reached. `status` is the HTTP status, 0 when there was no answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class GatewayClient:
    """Synchronous client; safe to share between threads."""

    def __init__(self, url: str, admin_key: str, *, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {admin_key}", wire.API_HEADER: wire.API_VERSION},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def create_rollout(self, new: wire.NewRollout) -> wire.RolloutCreated:
        """Open a session for one attempt at a task."""
        return self._post("/rollouts", new, wire.RolloutCreated)

    def finish_rollout(self, rollout: str, result: wire.FinishRollout) -> wire.RolloutInfo:
        """Close the session with its reward, or with the cause why it has none. Idempotent for the same result."""
        return self._post(f"/rollouts/{rollout}/finish", result, wire.RolloutInfo)

    def rollout(self, rollout: str) -> wire.RolloutInfo:
        """One rollout's state and counts."""
        return self._get(f"/rollouts/{rollout}", wire.RolloutInfo)

    def answers(self, rollout: str) -> wire.Answers:
        """What one rollout's answers were like."""
        return self._get(f"/rollouts/{rollout}/answers", wire.Answers)

    def open_rollouts(self) -> list[wire.RolloutInfo]:
        """Rollouts that nobody finished, at most 1000, newest first."""
        listed = self._call("GET", "/rollouts?state=open&limit=1000", None)
        return [wire.RolloutInfo.model_validate(one) for one in listed]

    def group_rollouts(self, group: str) -> list[wire.RolloutInfo]:
        """Every rollout of a group, at most 1000, newest first."""
        listed = self._call("GET", f"/rollouts?{urlencode({'group': group, 'limit': 1000})}", None)
        return [wire.RolloutInfo.model_validate(one) for one in listed]

    def lease(self, new: wire.NewLease) -> wire.Lease:
        """Take finished groups; an empty answer means none is ready."""
        return self._post("/leases", new, wire.Lease)

    def heartbeat(self, lease: str, beat: wire.Heartbeat) -> None:
        """Keep a lease; raises with status 409 when it was given to someone else."""
        self._call("POST", f"/leases/{lease}/heartbeat", beat)

    def ack(self, lease: str, ack: wire.AckLease) -> None:
        """Say what became of leased groups; raises with status 409 for a stale epoch."""
        self._call("POST", f"/leases/{lease}/ack", ack)

    def durable(self, done: wire.DurableStep) -> None:
        """Acknowledgements up to this step are final."""
        self._call("POST", "/checkpoints", done)

    def resume(self, resume: wire.Resume) -> wire.Resumed:
        """Give back everything acknowledged after a step, or still leased."""
        return self._post("/resume", resume, wire.Resumed)

    def close_groups(self, end: wire.CloseGroups) -> wire.GroupsClosed:
        """Drop what is open, ready or leased: training is over."""
        return self._post("/groups/close", end, wire.GroupsClosed)

    def publish_adapter(self, new: wire.PublishAdapter) -> wire.AdapterInfo:
        """Load a LoRA folder as the policy's next version and route to it; the version is never reused."""
        return self._post("/adapters", new, wire.AdapterInfo)

    def adapters(self, policy: str) -> list[wire.AdapterInfo]:
        """Every version of a policy ever allocated, with its state."""
        listed = self._call("GET", f"/adapters?{urlencode({'policy': policy})}", None)
        return [wire.AdapterInfo.model_validate(one) for one in listed]

    def policy(self, name: str) -> wire.PolicyInfo:
        """The policy's current version and its live ones."""
        return self._get(f"/policies/{name}", wire.PolicyInfo)

    def status(self) -> wire.Status:
        """A small summary for progress displays."""
        return self._get("/status", wire.Status)

    def ready(self) -> bool:
        """Whether the gateway can serve turns now."""
        try:
            return self._http.get("/readyz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def _post(self, path: str, body: BaseModel, model: type[M]) -> M:
        return model.model_validate(self._call("POST", path, body))

    def _get(self, path: str, model: type[M]) -> M:
        return model.model_validate(self._call("GET", path, None))

    def _call(self, method: str, path: str, body: BaseModel | None) -> Any:
        content = None if body is None else body.model_dump_json().encode()
        try:
            response = self._http.request(
                method, path, content=content, headers={"content-type": "application/json"} if content else None
            )
        except httpx.HTTPError as error:
            raise GatewayError(0, f"no answer from the gateway at {self.url}: {error}; is it running?") from error
        if response.is_error:
            raise GatewayError(response.status_code, _error_text(response))
        return response.json() if response.content else None


def _error_text(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:500]}"
