"""The administration routes: rollouts, leases, checkpoints, adapters, status. All need the administration key.

Each handler is one call; the wire models validate. A session's key opens nothing here.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response

from turngate.proxy import wire
from turngate.proxy.control import Control
from turngate.proxy.errors import BadRequest, Unauthorized
from turngate.proxy.leasing import lease_groups
from turngate.proxy.status import answers, infos, status
from turngate.proxy.store.records import RolloutFilter


def _control(request: Request, response: Response) -> Control:
    control: Control = request.app.state.control
    response.headers[wire.API_HEADER] = wire.API_VERSION
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), control.admin_key.encode()):
        raise Unauthorized("this needs `Authorization: Bearer <administration key>`; it is in the store's admin.key")
    wanted = request.headers.get(wire.API_HEADER, wire.API_VERSION)
    if wanted != wire.API_VERSION:
        raise BadRequest(
            f"the request is for version {wanted[:20]!r} of this API, this gateway serves {wire.API_VERSION}: use a "
            "client and a gateway of the same release, or leave the header out",
            code="api_version",
        )
    return control


Admin = Annotated[Control, Depends(_control)]
router = APIRouter(tags=["administration"])


@router.post("/rollouts", status_code=201)
async def create_rollout(new: wire.NewRollout, request: Request, control: Admin) -> wire.RolloutCreated:
    """Open a session for one attempt at a task; its `base_url` and `api_key` go to the agent."""
    control.drain.check()
    base = control.settings.public_url or str(request.base_url)
    return control.rollouts.create(new, base.rstrip("/"))


@router.get("/rollouts")
async def list_rollouts(
    control: Admin,
    task: str | None = None,
    group: str | None = None,
    state: Literal["open", "finished"] | None = None,
    outcome: wire.Outcome | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> list[wire.RolloutInfo]:
    """Rollouts, newest first; `after` is the last id of the page before."""
    where = RolloutFilter(task=task, group=group, state=state, outcome=outcome, after=after, limit=limit)
    return infos(control, control.store.rollouts(where))


@router.get("/rollouts/{rollout}")
async def get_rollout(rollout: str, control: Admin) -> wire.RolloutInfo:
    """One rollout's state and counts."""
    return infos(control, [control.store.rollout(rollout)])[0]


@router.get("/rollouts/{rollout}/answers")
async def get_answers(rollout: str, control: Admin) -> wire.Answers:
    """What one rollout's answers were like: cut, empty, with tool calls."""
    return await asyncio.to_thread(answers, control, control.store.rollout(rollout))


@router.post("/rollouts/{rollout}/finish")
async def finish_rollout(rollout: str, result: wire.FinishRollout, control: Admin) -> wire.RolloutInfo:
    """Close a session with its reward, or with the cause why it has none."""
    return infos(control, [await control.rollouts.finish(rollout, result)])[0]


@router.post("/leases")
async def lease(new: wire.NewLease, control: Admin) -> wire.Lease:
    """Take finished groups, oldest first; no groups ready is an empty answer, an unknown policy a 404."""
    control.policies.current(new.policy)
    return await asyncio.to_thread(lease_groups, control, new)


@router.post("/leases/{lease_id}/heartbeat", status_code=204)
async def heartbeat(lease_id: str, beat: wire.Heartbeat, control: Admin) -> None:
    """Keep a lease: the trainer is at work on its groups."""
    control.store.heartbeat(lease_id, beat, control.utc_ns())


@router.post("/leases/{lease_id}/ack", status_code=204)
async def ack(lease_id: str, done: wire.AckLease, control: Admin) -> None:
    """Say what became of leased groups; final once a checkpoint of that step is durable."""
    control.store.ack(lease_id, done, control.utc_ns())


@router.post("/checkpoints", status_code=204)
async def durable(done: wire.DurableStep, control: Admin) -> None:
    """A checkpoint is safely on disk."""
    control.policies.current(done.policy)
    control.store.durable(done.policy, done.step, done.path, control.utc_ns())


@router.post("/resume")
async def resume(again: wire.Resume, control: Admin) -> wire.Resumed:
    """Training goes on from a step; everything acknowledged later can be leased again."""
    control.policies.current(again.policy)
    return wire.Resumed(returned_groups=control.store.resume(again.policy, again.step, control.utc_ns()))


@router.post("/groups/close")
async def close_groups(end: wire.CloseGroups, control: Admin) -> wire.GroupsClosed:
    """Drop every group that is open, ready or leased, and revoke its lease: training is over."""
    control.policies.current(end.policy)
    return wire.GroupsClosed(dropped_groups=control.store.close_groups(end.policy, end.cause))


@router.post("/adapters", status_code=201)
async def publish(new: wire.PublishAdapter, control: Admin) -> wire.AdapterInfo:
    """Load an adapter on every replica under the next version, then route new rollouts to it."""
    info = await control.policies.publish(new, control.rollouts.cancel_pinned)
    if new.max_staleness is not None:
        await control.rollouts.cancel_stale(new.policy, info.version - new.max_staleness)
    return info


@router.get("/adapters")
async def adapters(control: Admin, policy: str | None = None) -> list[wire.AdapterInfo]:
    """Every version ever allocated, with its state."""
    return control.store.adapters(policy)


@router.get("/policies/{policy}")
async def policy_info(policy: str, control: Admin) -> wire.PolicyInfo:
    """A policy's current version and its live ones."""
    return control.policies.info(policy)


@router.get("/status")
async def get_status(control: Admin) -> wire.Status:
    """A small summary for progress displays."""
    return await status(control)
