"""What the control process asks of a worker: a handful of routes on the worker's own port, behind a key of their own.

The key is made at each start and never leaves the two processes. Without it these routes do not exist.
"""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from turngate.proxy.gateway import Gateway

KEY_HEADER = "x-turngate-internal"
MAX_WAIT_S = 600.0


class ClosedSession(BaseModel):
    """A session that takes no turn any more: how many it has, a digest over them (hex), and its flags."""

    turns: int
    digest: str
    flags: tuple[str, ...]


class Idle(BaseModel):
    """Seconds since the last request of an open session, 0 while one is in flight."""

    idle_s: float


class TurnsInFlight(BaseModel):
    """How many turns in flight name an adapter version."""

    turns: int


class Counts(BaseModel):
    """All turns of this worker, counted."""

    turns: int
    spliced: int
    breaks: dict[str, int]
    prompt_tokens: int
    completion_tokens: int


def _gateway(request: Request) -> Gateway:
    key = request.headers.get(KEY_HEADER, "")
    if not hmac.compare_digest(key.encode(), request.app.state.internal_key.encode()):
        raise HTTPException(404, "Not Found")
    gateway: Gateway = request.app.state.gateway
    return gateway


Worker = Annotated[Gateway, Depends(_gateway)]
router = APIRouter(prefix="/internal", include_in_schema=False)


@router.post("/sessions/{rollout}/close")
async def close_session(rollout: str, gateway: Worker) -> ClosedSession:
    """Close a session: a turn whose commit has begun is in it, no other is added."""
    seal, flags = await gateway.sessions.close(rollout)
    return ClosedSession(turns=seal.turns, digest=seal.digest.hex(), flags=flags)


@router.get("/sessions/{rollout}/idle")
async def idle(rollout: str, gateway: Worker) -> Idle:
    """How long nothing was asked of an open session."""
    return Idle(idle_s=gateway.sessions.idle_s(rollout))


@router.get("/naming/{policy}/{version}")
async def naming(
    policy: str, version: int, gateway: Worker, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
) -> TurnsInFlight:
    """How many turns in flight name a version, after waiting up to `wait_s` for them to end."""
    return TurnsInFlight(turns=await gateway.versions.naming(policy, version, wait_s))


@router.get("/counts")
async def counts(gateway: Worker) -> Counts:
    """All turns of this worker, counted."""
    found = gateway.turns.counts()
    return Counts(
        turns=found.turns,
        spliced=found.spliced,
        breaks=dict(found.breaks),
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
    )
