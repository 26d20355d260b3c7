"""Sessions: a worker's side of open rollouts: who holds which secret, what it may still spend, what it has said.

A session is built from the stores when it is first asked for, so a restarted worker goes on where it was. The commit
lock orders "this turn is kept" against "this session is closed": nothing is added to a finished rollout.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from turngate.proxy import wire
from turngate.proxy.errors import Gone, NotFound, StoreTrouble, TooMany
from turngate.proxy.keys import secret_digest
from turngate.proxy.reattach import Table
from turngate.proxy.settings import GatewaySettings
from turngate.proxy.splice import HistoryIndex, Plan
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import NotFound as NotStored
from turngate.proxy.store.errors import StoreError, StoreFull
from turngate.proxy.store.records import RolloutRecord, Seal
from turngate.proxy.store.space import SpaceProbe
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.store.writer import TurnWriter
from turngate.proxy.turns import Turn

ENGINE_FAULT = "engine_fault"
"""Flag of a session whose agent was told of an engine's fault; its rollout is not scored."""

TEACHER_FAULT = "teacher_fault"
"""Flag of a demonstration whose teacher gave no answer that the student could imitate; it is not scored either."""

CLOSED_KEPT = 10_000
"""How many closed sessions are remembered, until the control store has their results (milliseconds later)."""


@dataclass(slots=True)
class Session:
    """One open rollout. Mutable: it grows by a turn at a time, under `commit_lock`."""

    id: str
    new: wire.NewRollout
    policy: str
    version: int
    opened_ns: int
    created_at_ns: int
    index: HistoryIndex
    turns: dict[str, Turn]
    sampling: dict[str, Any]
    requests: int = 0
    in_flight: int = 0
    touched_ns: int = 0
    tools_seen: bool = False
    generated_tokens: int = 0
    closed: bool = False
    secret: bytes = b""
    flags: set[str] = field(default_factory=set)
    commit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tellings: Table = field(default_factory=dict)

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

    def path_tokens(self, plan: Plan) -> int:
        """How many tokens of a planned turn's prompt are recorded: the whole path of the turn it continues."""
        return self.turns[plan.base].path_tokens if plan.kind == "spliced" and plan.base is not None else 0

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
        *,
        worker: int = 0,
        released: Callable[[Session], None] = lambda session: None,
        utc_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._settings = settings
        self._control = control
        self._turns = turns
        self._writer = writer
        self._worker = worker
        self._space = SpaceProbe(turns.path.parent, settings.min_free_bytes)
        self._released = released
        self._utc_ns = utc_ns
        self._open: dict[str, Session] = {}
        self._by_secret: dict[bytes, str] = {}
        self._closed: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    @property
    def open_count(self) -> int:
        """How many sessions have been used since the start and are open."""
        return len(self._open)

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
        if record.worker != self._worker:
            raise NotFound("no session has this key here: use the base_url that POST /rollouts returned")
        if record.id in self._closed and record.state == "open":
            raise Gone(f"rollout {record.id} is being finished; create a new one with POST /rollouts")
        if record.state != "open":
            raise Gone(f"rollout {record.id} is finished ({record.outcome}); create a new one with POST /rollouts")
        session = self._open.get(record.id) or self._load(record)
        self._by_secret[digest], session.secret = record.id, digest
        return session

    async def close(self, rollout: str) -> tuple[Seal, tuple[str, ...]]:
        """Close a session: what its turns are now, and its flags. Again is fine, and nothing can be added after it.

        It stays closed here although the control store calls the rollout open until its result is written there.
        """
        session = self._open.get(rollout)
        flags = self._closed.pop(rollout, ())
        if session is not None:
            async with session.commit_lock:
                session.closed = True
            flags = tuple(sorted(session.flags))
            self._open.pop(rollout, None)
            self._by_secret.pop(session.secret, None)
            self._released(session)
        self._closed[rollout] = flags
        while len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)
        return self._turns.seal(rollout), flags

    def idle_s(self, rollout: str) -> float:
        """Seconds since the last request of an open session, 0 while one is in flight; since it was opened if none.

        Raises:
            NotStored: there is no such rollout.
        """
        session = self._open.get(rollout)
        if session is not None:
            return 0.0 if session.in_flight else (time.monotonic_ns() - session.touched_ns) / 1e9
        last_ns = self._turns.last_received_ns(rollout) or self._control.rollout(rollout).created_at_ns
        return max(0, self._utc_ns() - last_ns) / 1e9

    def enter(self, session: Session) -> None:
        """Count a request in.

        Raises:
            Gone: the rollout was finished.
            TooMany: the session's own concurrency limit is reached.
            StoreFull: its turn could not be kept.
        """
        self._space.check()
        if session.closed:
            raise Gone(f"rollout {session.id} is finished; create a new one with POST /rollouts")
        own = session.new.budgets.max_concurrency
        limit = min(self._settings.max_session_concurrency, own or self._settings.max_session_concurrency)
        if session.in_flight >= limit:
            raise TooMany(f"this session has {session.in_flight} requests in flight, its limit is {limit}; retry later")
        session.in_flight += 1
        session.requests += 1
        session.touched_ns = time.monotonic_ns()

    def join(self, session: Session) -> None:
        """Count in a request that is told another one's answer: part of no budget."""
        session.in_flight += 1

    def leave(self, session: Session) -> None:
        """Count a request out."""
        session.in_flight -= 1
        session.touched_ns = time.monotonic_ns()

    async def keep(self, session: Session, make: Callable[[int], Turn], remember: Callable[[Turn], None]) -> Turn:
        """Commit a turn durably; `make` gets its sequence number. After this returns the answer may be ended.

        Once begun it is not cancelled: a client that leaves during the commit must not make store and session differ.

        Raises:
            Gone: the rollout was finished while the turn was being sampled; the turn is dropped.
            StoreTrouble: the turn could not be written.
        """
        if self._writer.takes_now and not session.commit_lock.locked():
            turn = self._made(session, make)
            try:  # nothing is awaited: nobody can come between, nor cut it off
                kept = self._writer.commit_now(turn)
            except StoreError as error:
                raise self._not_kept(error) from error
            if kept:
                self._kept(session, turn, remember)
                return turn
        return await asyncio.shield(self._keep_waiting(session, make, remember))

    async def _keep_waiting(
        self, session: Session, make: Callable[[int], Turn], remember: Callable[[Turn], None]
    ) -> Turn:
        async with session.commit_lock:
            turn = self._made(session, make)
            try:
                await self._writer.commit(turn)
            except StoreError as error:
                raise self._not_kept(error) from error
            self._kept(session, turn, remember)
        return turn

    def _made(self, session: Session, make: Callable[[int], Turn]) -> Turn:
        if session.closed:
            raise Gone(f"rollout {session.id} was finished while this turn was being sampled")
        return make(session.next_seq())

    def _not_kept(self, error: StoreError) -> StoreTrouble:
        if isinstance(error, StoreFull):
            self._space.failed()
        return StoreTrouble(f"the turn could not be kept, so it has no answer: {error}")

    def _kept(self, session: Session, turn: Turn, remember: Callable[[Turn], None]) -> None:
        session.turns[turn.id] = turn
        session.generated_tokens += len(turn.completion_ids)
        remember(turn)

    def _load(self, record: RolloutRecord) -> Session:
        turns = self._turns.turns(record.id)
        session = self._build(record.id, record.new, record.policy, record.version, turns, record.created_at_ns)
        self._open[record.id] = session
        return session

    def _build(
        self, rollout: str, new: wire.NewRollout, policy: str, version: int, turns: list[Turn], created_at_ns: int
    ) -> Session:
        sampling = {**self._settings.training_sampling, **new.sampling} if new.training else dict(new.sampling)
        age_ns, now_ns = max(0, self._utc_ns() - created_at_ns), time.monotonic_ns()
        return Session(
            id=rollout,
            new=new,
            policy=policy,
            version=version,
            opened_ns=now_ns - age_ns,
            touched_ns=now_ns,
            created_at_ns=created_at_ns,
            index=HistoryIndex.from_turns(turns),
            turns={turn.id: turn for turn in turns},
            sampling=sampling,
            requests=len(turns),
            generated_tokens=sum(len(turn.completion_ids) for turn in turns),
        )
