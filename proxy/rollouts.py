"""Rollouts from their opening to their result: placed on a worker, closed there first, finished in the control store.

The order is the contract: once a rollout's result is written its session takes no turn any more, so what is sealed is
all there is. The control process alone does this.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from turngate.proxy import wire
from turngate.proxy.errors import BadRequest, Failed, GatewayRefusal, TooMany
from turngate.proxy.ids import new_secret, uuid7
from turngate.proxy.keys import secret_digest, secret_prefix
from turngate.proxy.links import Link
from turngate.proxy.policies import Policies
from turngate.proxy.sampling import check_policy
from turngate.proxy.sessions import ENGINE_FAULT, TEACHER_FAULT
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import StoreError
from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.store.rollouts import check_result
from turngate.proxy.store.space import SpaceProbe

log = logging.getLogger("turngate.rollouts")

STALE = "stale"
"""Cause of a rollout whose every token would be too old to be trained."""

IDLE = "session_idle"
"""Cause of a rollout that the gateway closed because nobody spoke in it for long."""


class Rollouts:
    """All open rollouts, over all workers (`links`, by their number)."""

    def __init__(
        self,
        settings: GatewaySettings,
        control: ControlStore,
        policies: Policies,
        links: Sequence[Link],
        *,
        exact_logprobs: bool,
        finished: Callable[[RolloutRecord], None] = lambda record: None,
        utc_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._settings = settings
        self._control = control
        self._policies = policies
        self._links = links
        self._exact_logprobs = exact_logprobs
        self._space = SpaceProbe(control.path.parent, settings.min_free_bytes)
        self._finished = finished
        self._utc_ns = utc_ns
        self._open: Counter[int] = Counter(control.open_by_worker())
        for record in control.open_rollouts():
            if record.new.pin == "rollout":
                policies.pin(record.policy, record.version, held=not record.new.training)

    def create(self, new: wire.NewRollout, asked_at: str) -> wire.RolloutCreated:
        """Open a session on the worker that has the fewest, for a client that reached the gateway at `asked_at`.

        Raises:
            BadRequest: an impossible sampling policy, or training on an engine that reports raw log-probs.
            TooMany: the gateway's session limit is reached.
            StoreFull: its turns could not be kept.
        """
        self._space.check()
        check_policy(new.sampling)
        if new.training and not self._exact_logprobs:
            raise BadRequest(
                "the engine reports raw log-probs, which are not those of the sampled distribution: start vLLM with "
                "--logprobs-mode processed_logprobs, or open the rollout with training=false"
            )
        if (opened := self._open.total()) >= self._settings.max_sessions:
            raise TooMany(f"{opened} sessions are open, the limit is max_sessions; finish some first")
        policy = new.policy or self._settings.policy
        version = self._version(new, policy)
        now_ns = self._utc_ns()
        link = min(self._links, key=lambda one: (self._open[one.worker], one.worker))
        rollout, secret = uuid7(now_ns), new_secret(secret_prefix(link.worker if len(self._links) > 1 else None))
        self._control.create_rollout(
            rollout, secret_digest(secret), new=new, policy=policy, version=version, now_ns=now_ns, worker=link.worker
        )
        self._open[link.worker] += 1
        if new.pin == "rollout":
            self._policies.pin(policy, version, held=not new.training)
        base_url = f"{link.address(asked_at)}/s/{secret}/v1"
        return wire.RolloutCreated(id=rollout, base_url=base_url, api_key=secret, policy=policy, version=version)

    async def finish(self, rollout: str, result: wire.FinishRollout) -> RolloutRecord:
        """Close a rollout with its result; the same result twice is fine.

        Raises:
            StoreError: Invalid (no reward or no cause), Conflict (finished otherwise before) or NotFound.
            WorkerAway: its worker could not be asked to close the session; nothing has changed.
        """
        check_result(rollout, result)
        record = self._control.rollout(rollout)
        if record.state != "open":
            return self._again(record, result)
        closed = await self._link(record.worker).close_session(rollout)
        if (meanwhile := self._control.rollout(rollout)).state != "open":
            return self._again(meanwhile, result)
        if closed.flags:
            result = flagged(result, closed.flags)
        done = self._control.finish_rollout(rollout, result, self._utc_ns(), seal=closed.seal)
        self._finished(done)
        self._open[record.worker] -= 1
        if record.new.pin == "rollout":
            await self._policies.unpin(record.policy, record.version, held=not record.new.training)
        return done

    async def cancel_pinned(self, policy: str, version: int, cause: str) -> int:
        """Cancel every open rollout pinned to a version; returns how many. Those that follow the newest are not."""
        pinned = [r for r in self._control.open_rollouts() if r.policy == policy and r.new.pin == "rollout"]
        victims = [record for record in pinned if record.version == version]
        for record in victims:
            await self.finish(record.id, wire.FinishRollout(reward=None, outcome="cancelled", cause=cause))
        return len(victims)

    async def cancel_stale(self, policy: str, oldest: int) -> int:
        """Cancel open training rollouts pinned to a version before `oldest`: their tokens are too old to be trained.

        How many. One whose worker is away stays open; the next publication comes back to it.
        """
        cancelled = 0
        for record in self._control.open_rollouts():
            pinned = record.policy == policy and record.new.pin == "rollout" and record.new.training
            if pinned and record.version < oldest:
                gone = wire.FinishRollout(reward=None, outcome="cancelled", cause=STALE)
                try:
                    await self.finish(record.id, gone)
                except (GatewayRefusal, StoreError) as error:
                    log.warning("stale_not_cancelled", extra={"rollout": record.id, "error": str(error)})
                    continue
                cancelled += 1
        return cancelled

    async def close_idle(self, longest_s: float) -> list[RolloutRecord]:
        """Close every open rollout of which nothing was asked for `longest_s`; those closed.

        Where its group has a deadline it leaves its place to another attempt, of a runner that goes on; else nobody
        would ever settle the group, so it counts. One whose worker is away is left for the next time.
        """
        before_ns, closed = self._utc_ns() - round(longest_s * 1e9), []
        for record in self._control.open_rollouts():
            if record.created_at_ns > before_ns or await self._link(record.worker).idle_s(record.id) < longest_s:
                continue
            replaced = record.new.group_deadline_s is not None
            result = wire.FinishRollout(outcome="unscorable", cause=IDLE, replaced=replaced)
            try:
                closed.append(await self.finish(record.id, result))
            except (GatewayRefusal, StoreError) as error:
                log.warning("idle_session_not_closed", extra={"rollout": record.id, "error": str(error)})
        return closed

    def _version(self, new: wire.NewRollout, policy: str) -> int:
        """The version a new rollout is pinned to.

        Raises:
            BadRequest: it asks for one that it cannot have.
        """
        if new.version is None:
            return self._policies.current(policy)
        if new.training or new.pin != "rollout":
            raise BadRequest("`version` is for evaluations: say training=false and pin=rollout, or leave it out")
        if not self._policies.is_live(policy, new.version):
            raise BadRequest(f"version {new.version} of {policy} is not live; `GET /policies/{policy}` lists those")
        return new.version

    def _again(self, record: RolloutRecord, result: wire.FinishRollout) -> RolloutRecord:
        if _taken_back(record, result):
            return record
        return self._control.finish_rollout(record.id, result, self._utc_ns())

    def _link(self, worker: int) -> Link:
        for link in self._links:
            if link.worker == worker:
                return link
        raise Failed(f"worker {worker} of this store is not running")


def flagged(result: wire.FinishRollout, flags: Collection[str]) -> wire.FinishRollout:
    """`result` with the session's flags; a score is taken back where the engines, not the policy, made the outcome."""
    metrics = {**result.metrics, "flags": sorted(flags)}
    fault = next((fault for fault in (ENGINE_FAULT, TEACHER_FAULT) if fault in flags), None)
    if fault is None or result.outcome != "scored":
        return result.model_copy(update={"metrics": metrics})
    metrics["reward_of_a_fault"] = result.reward
    return result.model_copy(update={"metrics": metrics, "outcome": "unscorable", "cause": fault, "reward": None})


def _taken_back(record: RolloutRecord, result: wire.FinishRollout) -> bool:
    """Whether `result` is the score again that `flagged` took back when the rollout was finished."""
    told = result.outcome == "scored" and record.cause in (ENGINE_FAULT, TEACHER_FAULT)
    return told and record.metrics.get("reward_of_a_fault") == result.reward
