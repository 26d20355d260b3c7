"""Where training groups come from: a thread that leases them from the gateway, keeps the leases and settles them.

One lease holds one group, so each group is settled by itself. A gateway that is away for a while is asked again; what
the gateway must never see is two answers for one group, so the lineage (group to step) decides when a group comes back.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from turngate.proxy import wire
from turngate.proxy.client import GatewayClient, GatewayError
from turngate.trainer.errors import EngineLost, GatewayLost, TrainerError
from turngate.trainer.rows import GroupRows, ready_group
from turngate.trainer.settings import Credit

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How groups are leased. `ahead` is how many ready groups may wait in memory."""

    policy: str
    ahead: int
    ttl_s: float
    patience_s: float
    max_row_tokens: int | None
    credit: Credit = "each"


class LeaseSource:
    """Leases groups in the background; the names of its public parts are those a TRL rollout worker must have.

    `lineage` maps every group trained in this run's history to its step; the caller saves it with each checkpoint.
    """

    def __init__(
        self,
        client: GatewayClient,
        terms: LeaseTerms,
        *,
        lineage: dict[str, int],
        step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.terms = terms
        self.lineage = lineage
        self.rollout_buffer: queue.Queue[GroupRows] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.counts: Counter[str] = Counter()
        self._next_step = step + 1
        self._clock = clock
        self._leases: dict[str, tuple[str, int]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._failure: TrainerError | None = None
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin leasing and heartbeating. Idempotent."""
        if self._threads:
            return
        for work in (self._lease_forever, self._beat_forever):
            thread = threading.Thread(target=work, name=f"turngate-{work.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop both threads; groups still held go back when their lease runs out or the run is resumed."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def update_model_version(self, model_version: int) -> None:
        """The gateway already knows which version is live."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the leasing thread, if anything did.

        Raises:
            GatewayLost: no answer for longer than the patience, or a refusal that asking again cannot change.
        """
        if self._failure is not None:
            raise self._failure

    def next_group(self, timeout_s: float) -> GroupRows | None:
        """A ready group, or None when none came in time."""
        self.check_health(timeout_s)
        try:
            return self.rollout_buffer.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def group_states(self) -> Mapping[str, int] | None:
        """How many groups the gateway has in each state; None when it does not say."""
        try:
            return self.client.status().groups
        except GatewayError:
            return None

    def trained(self, groups: Sequence[GroupRows], step: int, rows: dict[str, list[dict[str, Any]]]) -> None:
        """Write groups into the lineage and acknowledge them as trained in `step`, with per-row statistics by group.

        Raises:
            GatewayLost: the gateway did not answer within the patience.
        """
        self._next_step = step + 1
        for group in groups:
            self.lineage[group.id] = step
        for group in groups:
            self._settle(group.id, wire.GroupAck(group=group.id, fate="trained", rows=rows.get(group.id, [])), step)

    def give_up(self, groups: Sequence[GroupRows], step: int, cause: str) -> None:
        """Settle the groups of a step that was made and changed no weight."""
        for group in groups:
            self.drop(group, cause)
        self._next_step = step + 1

    def drop(self, group: GroupRows, cause: str) -> None:
        """Settle a group that will not be trained; it counts for the step now being planned."""
        self.counts[f"dropped: {cause}"] += 1
        self._settle(group.id, wire.GroupAck(group=group.id, fate="dropped", cause=cause), self._next_step)

    def take_counts(self) -> Counter[str]:
        """Groups settled without training since the last call, by fate and cause; unscored rollouts by cause."""
        with self._lock:
            counts, self.counts = self.counts, Counter()
        return counts

    def patiently(self, what: str, call: Callable[[], T]) -> T:
        """`call()`, again and again while the gateway gives no answer or an internal error.

        Raises:
            GatewayError: a refusal (4xx).
            GatewayLost: the patience is over. EngineLost: so too, but it did answer.
        """
        began, wait_s = self._clock(), FIRST_WAIT_S
        while True:
            try:
                return call()
            except GatewayError as error:
                if 400 <= error.status < 500:
                    raise
                if self._clock() - began > self.terms.patience_s:
                    lost = EngineLost if error.status else GatewayLost
                    raise lost(f"{what}: {error} (gave up after {self.terms.patience_s:.0f} s)") from error
                log.warning("%s: %s; asking again in %.1f s", what, error, wait_s)
            self._stopped.wait(wait_s) if not self._stopped.is_set() else time.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    def _lease_forever(self) -> None:
        wait_s = FIRST_WAIT_S
        while not self._stopped.is_set():
            if self.rollout_buffer.qsize() >= self.terms.ahead:
                self._stopped.wait(FIRST_WAIT_S)
                continue
            try:
                new = wire.NewLease(policy=self.terms.policy, max_groups=1, ttl_s=self.terms.ttl_s)
                lease = self.patiently("leasing a group", partial(self.client.lease, new))
                for group in lease.groups:
                    self._admit(lease, group)
            except GatewayError as error:
                self._failure = GatewayLost(f"the gateway refuses to lease groups of {self.terms.policy}: {error}")
                return
            except TrainerError as error:
                self._failure = error
                return
            wait_s = FIRST_WAIT_S if lease.groups else min(wait_s * 1.5, LONGEST_WAIT_S / 2)
            if not lease.groups:
                self._stopped.wait(wait_s)

    def _admit(self, lease: wire.Lease, group: wire.LeasedGroup) -> None:
        with self._lock:
            known = group.id in self._leases
            self._leases[group.id] = (lease.lease, lease.epoch)
        if group.id in self.lineage:
            step = self.lineage[group.id]
            self._settle(group.id, wire.GroupAck(group=group.id, fate="trained"), step)
            return
        if known:
            return
        ready = ready_group(group, max_row_tokens=self.terms.max_row_tokens, credit=self.terms.credit)
        with self._lock:
            self.counts.update({f"unscored: {cause}": n for cause, n in ready.uncounted.items()})
            self.counts.update({f"unadmitted: {cause}": n for cause, n in ready.unadmitted.items()})
            if ready.fate != "trained":
                self.counts[ready.fate if ready.cause is None else f"{ready.fate}: {ready.cause}"] += 1
        if ready.fate == "trained":
            self.rollout_buffer.put(ready)
        else:
            ack = wire.GroupAck(group=group.id, fate=ready.fate, cause=ready.cause)
            self._settle(group.id, ack, self._next_step)

    def _settle(self, group: str, ack: wire.GroupAck, step: int) -> None:
        with self._lock:
            lease, epoch = self._leases[group]
        body = wire.AckLease(epoch=epoch, step=step, groups=[ack])
        try:
            self.patiently(f"acknowledging group {group}", lambda: self.client.ack(lease, body))
        except GatewayError as error:
            log.warning(
                "group %s was leased again before it was settled (%s); the lineage keeps it single", group, error
            )
        with self._lock:
            if self._leases.get(group) == (lease, epoch):
                del self._leases[group]

    def _beat_forever(self) -> None:
        while not self._stopped.wait(self.terms.ttl_s / 4):
            with self._lock:
                held = dict(self._leases)
            for group, (lease, epoch) in held.items():
                try:
                    self.client.heartbeat(lease, wire.Heartbeat(epoch=epoch, ttl_s=self.terms.ttl_s))
                except GatewayError as error:
                    log.warning("heartbeat for group %s: %s", group, error)
