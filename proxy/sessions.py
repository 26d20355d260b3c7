"""Sessions: the gateway's side of open rollouts: who holds which secret, what it may still spend, what it has said.

A session is rebuilt from the stores whenever it is first asked for, so a restarted gateway goes on where it was. The
commit lock orders "this turn is kept" against "this rollout is finished": nothing is added to a finished rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from turngate.proxy import wire
from turngate.proxy.errors import BadRequest, Gone, NotFound, TooMany
from turngate.proxy.ids import new_secret, uuid7
from turngate.proxy.policies import Policies
from turngate.proxy.sampling import check_policy
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.splice import HistoryIndex
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import NotFound as NotStored
from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.store.writer import TurnWriter
from turngate.proxy.turns import Turn

SECRET_PREFIX = "tg-"

ENGINE_FAULT = "engine_fault"
"""Flag of a session whose agent was told of an engine's fault; its rollout is not scored."""


@dataclass(slots=True)
class Session:
    """One open rollout. Mutable: it grows by a turn at a time, under `commit_lock`."""

    id: str
    new: wire.NewRollout
    policy: str
    version: int
    opened_ns: int
    index: HistoryIndex
    turns: dict[str, Turn]
    sampling: dict[str, Any]
    requests: int = 0
    in_flight: int = 0
    tools_seen: bool = False
    generated_tokens: int = 0
    closed: bool = False
    secret: bytes = b""
    flags: set[str] = field(default_factory=set)
    commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def spent(self, now_ns: int) -> str | None:
        """Which budget is used up, or None; the request being served is counted already (see `Sessions.enter`)."""
        budgets, age_s = self.new.budgets, (now_ns - self.opened_ns) / 1e9
        if budgets.max_requests is not None and self.requests > budgets.max_requests:
            return "budget:requests"
        if budgets.max_generated_tokens is not None and self.generated_tokens >= budgets.max_generated_tokens:
            return "budget:generated_tokens"
        if budgets.max_wall_s is not None and age_s >= budgets.max_wall_s:
            return "budget:wall_clock"
        if self.new.deadline_s is not None and age_s >= self.new.deadline_s:
            return "deadline"
        return None

    def next_seq(self) -> int:
        """The sequence number of the turn being committed; call under `commit_lock`."""
        return len(self.turns)


class Sessions:
    """All open sessions, by id and by the hash of their secret."""

    def __init__(
        self,
        settings: GatewaySettings,
        control: ControlStore,
        turns: TurnStore,
        writer: TurnWriter,
        policies: Policies,
        *,
        exact_logprobs: bool,
        released: Callable[[str], None] = lambda rollout: None,
        utc_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._settings = settings
        self._control = control
        self._turns = turns
        self._writer = writer
        self._policies = policies
        self._exact_logprobs = exact_logprobs
        self._released = released
        self._utc_ns = utc_ns
        self._open: dict[str, Session] = {}
        self._by_secret: dict[bytes, str] = {}

    def restore(self) -> None:
        """Pin the versions of the rollouts that were open when the gateway stopped."""
        for record in self._control.open_rollouts():
            if record.new.pin == "rollout":
                self._policies.pin(record.policy, record.version)

    @property
    def open_count(self) -> int:
        """How many sessions have been used since the start and are open."""
        return len(self._open)

    def create(self, new: wire.NewRollout, base_url: str) -> wire.RolloutCreated:
        """Open a session.

        Raises:
            BadRequest: an impossible sampling policy, or training on an engine that reports raw log-probs.
            TooMany: the gateway's session limit is reached.
        """
        check_policy(new.sampling)
        if new.training and not self._exact_logprobs:
            raise BadRequest(
                "the engine reports raw log-probs, which are not those of the sampled distribution: start vLLM with "
                "--logprobs-mode processed_logprobs, or open the rollout with training=false"
            )
        if len(self._open) >= self._settings.max_sessions:
            raise TooMany(f"{len(self._open)} sessions are open, the limit is max_sessions; finish some first")
        policy = new.policy or self._settings.policy
        version = self._policies.current(policy)
        now_ns = self._utc_ns()
        rollout, secret = uuid7(now_ns), new_secret(SECRET_PREFIX)
        digest = secret_digest(secret)
        self._control.create_rollout(
            rollout, secret_sha256=digest, new=new, policy=policy, version=version, now_ns=now_ns
        )
        if new.pin == "rollout":
            self._policies.pin(policy, version)
        self._by_secret[digest] = rollout
        self._open[rollout] = self._build(rollout, new, policy, version, [], now_ns)
        self._open[rollout].secret = digest
        return wire.RolloutCreated(
            id=rollout, base_url=f"{base_url}/s/{secret}/v1", api_key=secret, policy=policy, version=version
        )

    def by_secret(self, secret: str) -> Session:
        """The open session of a secret.

        Raises:
            NotFound: no session has it.
            Gone: its rollout is finished.
        """
        digest = secret_digest(secret)
        rollout = self._by_secret.get(digest)
        if rollout is not None and rollout in self._open:
            return self._open[rollout]
        try:
            record = self._control.rollout_by_secret(digest)
        except NotStored as error:
            raise NotFound("no session has this key: use the base_url that POST /rollouts returned") from error
        if record.state != "open":
            raise Gone(f"rollout {record.id} is finished ({record.outcome}); create a new one with POST /rollouts")
        session = self._open.get(record.id) or self._load(record)
        self._by_secret[digest], session.secret = record.id, digest
        return session

    async def finish(self, rollout: str, result: wire.FinishRollout) -> RolloutRecord:
        """Close a rollout with its result; the same result twice is fine.

        Raises:
            StoreError: Invalid (no reward or no cause), Conflict (finished otherwise before) or NotFound.
        """
        session = self._open.get(rollout)
        if session is None:
            record = self._control.rollout(rollout)
            if record.state == "open":
                session = self._load(record)
        if session is None:
            return record if _taken_back(record, result) else self._finish(rollout, result)
        async with session.commit_lock:
            if session.flags:
                result = flagged(result, session.flags)
            was_open = not session.closed
            record = self._finish(rollout, result)
            session.closed = True
        if was_open:
            self._open.pop(rollout, None)
            self._by_secret.pop(session.secret, None)
            self._released(rollout)
            if session.new.pin == "rollout":
                await self._policies.unpin(session.policy, session.version)
        return record

    async def cancel_pinned(self, policy: str, version: int, cause: str) -> int:
        """Cancel every open rollout pinned to a version; returns how many. Those that follow the newest are not."""
        pinned = [r for r in self._control.open_rollouts() if r.policy == policy and r.new.pin == "rollout"]
        victims = [record for record in pinned if record.version == version]
        for record in victims:
            await self.finish(record.id, wire.FinishRollout(reward=None, outcome="cancelled", cause=cause))
        return len(victims)

    def enter(self, session: Session) -> None:
        """Count a request in.

        Raises:
            Gone: the rollout was finished.
            TooMany: the session's own concurrency limit is reached.
        """
        if session.closed:
            raise Gone(f"rollout {session.id} is finished; create a new one with POST /rollouts")
        limit = session.new.budgets.max_concurrency
        if limit is not None and session.in_flight >= limit:
            raise TooMany(f"this session has {session.in_flight} requests in flight, its limit is {limit}; retry later")
        session.in_flight += 1
        session.requests += 1

    def leave(self, session: Session) -> None:
        """Count a request out."""
        session.in_flight -= 1

    async def keep(self, session: Session, make: Callable[[int], Turn], remember: Callable[[Turn], None]) -> Turn:
        """Commit a turn durably; `make` gets its sequence number. After this returns the answer may be ended.

        Once begun it is not cancelled: a client that leaves during the commit must not make store and session differ.

        Raises:
            Gone: the rollout was finished while the turn was being sampled; the turn is dropped.
            StoreError: the turn could not be written.
        """
        return await asyncio.shield(self._keep(session, make, remember))

    async def _keep(self, session: Session, make: Callable[[int], Turn], remember: Callable[[Turn], None]) -> Turn:
        async with session.commit_lock:
            if session.closed:
                raise Gone(f"rollout {session.id} was finished while this turn was being sampled")
            turn = make(session.next_seq())
            await self._writer.commit(turn)
            session.turns[turn.id] = turn
            session.generated_tokens += len(turn.completion_ids)
            remember(turn)
        return turn

    def _finish(self, rollout: str, result: wire.FinishRollout) -> RolloutRecord:
        return self._control.finish_rollout(rollout, result, self._utc_ns(), seal=self._turns.seal(rollout))

    def _load(self, record: RolloutRecord) -> Session:
        turns = self._turns.turns(record.id)
        session = self._build(record.id, record.new, record.policy, record.version, turns, record.created_at_ns)
        self._open[record.id] = session
        return session

    def _build(
        self, rollout: str, new: wire.NewRollout, policy: str, version: int, turns: list[Turn], created_at_ns: int
    ) -> Session:
        sampling = {**self._settings.training_sampling, **new.sampling} if new.training else dict(new.sampling)
        age_ns = max(0, self._utc_ns() - created_at_ns)
        return Session(
            id=rollout,
            new=new,
            policy=policy,
            version=version,
            opened_ns=time.monotonic_ns() - age_ns,
            index=HistoryIndex.from_turns(turns),
            turns={turn.id: turn for turn in turns},
            sampling=sampling,
            requests=len(turns),
            generated_tokens=sum(len(turn.completion_ids) for turn in turns),
        )


def flagged(result: wire.FinishRollout, flags: Collection[str]) -> wire.FinishRollout:
    """`result` with the session's flags; a score is taken back where the engines, not the policy, made the outcome."""
    metrics = {**result.metrics, "flags": sorted(flags)}
    if ENGINE_FAULT not in flags or result.outcome != "scored":
        return result.model_copy(update={"metrics": metrics})
    metrics["reward_of_a_fault"] = result.reward
    return result.model_copy(
        update={"metrics": metrics, "outcome": "unscorable", "cause": ENGINE_FAULT, "reward": None}
    )


def _taken_back(record: RolloutRecord, result: wire.FinishRollout) -> bool:
    """Whether `result` is the score again that `flagged` took back when the rollout was finished."""
    told = result.outcome == "scored" and record.cause == ENGINE_FAULT
    return told and record.metrics.get("reward_of_a_fault") == result.reward


def secret_digest(secret: str) -> bytes:
    """SHA-256 of a secret: the only form in which it is kept."""
    return hashlib.sha256(secret.encode()).digest()
