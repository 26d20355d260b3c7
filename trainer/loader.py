"""The stream of step plans: waits for enough whole groups, then plans the step with the version held right now.

One item, `{"plan": StepPlan}`, is one optimizer step. Only the first process talks to the gateway; the others get its
plan. It never prefetches a plan, because a plan made early would count staleness against an older version.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from turngate.trainer.lease_source import LeaseSource
from turngate.trainer.planner import Bin, StepPlan, plan_step, usable
from turngate.trainer.rows import GroupRows

POLL_S = 0.25
QUIET_S = 10.0
"""So long a short batch is waited for: longer than a runner takes from one rollout's end to the next one's session."""


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """What every plan of a run shares. `whole_batches`: see `TrainSettings.schedule`, its `sync`."""

    groups_per_step: int
    max_staleness: int
    idle_timeout_s: float | None
    ranks: int = 1
    whole_batches: bool = False


class Arrival:
    """Whether a step's groups are there: enough that teach something, or the whole batch of a synchronous schedule.

    Of a batch, every group counts that the gateway has closed, also one without anything to train, and none is trained
    while another is generated, for that one would be older than the version made here. A batch may be short: after a
    resume, at a run's end, where all sessions of a group were refused. So it is over, too, when the gateway has had
    nothing that could come for `QUIET_S`.
    """

    def __init__(self, source: LeaseSource, terms: PlanTerms, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._terms = terms
        self._clock = clock
        self._before: int | None = None
        self._quiet: tuple[int, float] | None = None

    def complete(self, groups: Sequence[GroupRows]) -> bool:
        """Whether a step can be planned with these; a batch that teaches nothing makes none."""
        enough = len(groups) >= self._terms.groups_per_step
        if not self._terms.whole_batches:
            return enough
        told = self._source.group_states()
        if told is None:
            return enough
        closed = sum(told.values()) - told.get("open", 0)
        on_its_way = told.get("open", 0) + told.get("ready", 0) + max(told.get("leased", 0) - len(groups), 0)
        if self._before is None:
            self._before = closed - told.get("ready", 0) - told.get("leased", 0)
        if not enough:
            if on_its_way:
                self._quiet = None
                return False
            if closed - self._before < self._terms.groups_per_step and not self._quiet_long(closed):
                return False
        self._before, self._quiet = closed, None
        return bool(groups)

    def _quiet_long(self, closed: int) -> bool:
        """Whether nothing could come, and nothing came, for `QUIET_S`."""
        now_s = self._clock()
        if self._quiet is None or self._quiet[0] != closed:
            self._quiet = (closed, now_s)
        return now_s - self._quiet[1] >= QUIET_S


class PlanLoader:
    """Iterates over step plans until `stop` is set or the source stayed dry for `idle_timeout_s`.

    `wait_s` is how long the last plan waited for its groups. `where` gives the step just done and the version held.
    `share` hands the first process's plan to all (identity for one process).
    """

    def __init__(
        self,
        source: LeaseSource | None,
        terms: PlanTerms,
        *,
        where: Callable[[], tuple[int, int]],
        new_bin: Callable[[], Bin],
        stop: threading.Event,
        share: Callable[[StepPlan | None], StepPlan | None] = lambda plan: plan,
    ) -> None:
        self.source = source
        self.terms = terms
        self.wait_s = 0.0
        self._where = where
        self._new_bin = new_bin
        self._stop = stop
        self._share = share
        self._arrival = Arrival(source, terms) if source is not None else None

    def __iter__(self) -> Iterator[dict[str, StepPlan]]:
        while True:
            plan = self._share(self._next_plan() if self.source is not None else None)
            if plan is None:
                self._stop.set()
                return
            yield {"plan": plan}

    def _next_plan(self) -> StepPlan | None:
        assert self.source is not None
        assert self._arrival is not None
        began = time.monotonic()
        groups: list[GroupRows] = []
        given_up = 0
        while not self._arrival.complete(groups):
            group = self.source.next_group(POLL_S)
            if self._stop.is_set():
                return None
            _, version = self._where()
            if group is None:
                limit = self.terms.idle_timeout_s
                if limit is not None and time.monotonic() - began > limit:
                    return None
            elif not usable(group, version=version, max_staleness=self.terms.max_staleness):
                self.source.drop(group, "every token older than max_staleness")
                given_up += sum(row.tokens for row in group.rows)
            else:
                groups.append(group)
        self.wait_s = time.monotonic() - began
        step, version = self._where()
        return plan_step(
            groups,
            step=step + 1,
            version=version,
            max_staleness=self.terms.max_staleness,
            new_bin=self._new_bin,
            ranks=self.terms.ranks,
            given_up=given_up,
        )
