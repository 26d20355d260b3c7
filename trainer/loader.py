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

    Of a batch, groups without anything to train count too. A resumed run may find less than a batch: then it is over
    when the gateway has, twice in a row, nothing more that could come.
    """

    def __init__(self, source: LeaseSource, terms: PlanTerms) -> None:
        self.dropped = 0
        self._source = source
        self._terms = terms
        self._passed_before = source.passed_over
        self._quiet = 0

    def complete(self, groups: Sequence[GroupRows]) -> bool:
        """Whether a step can be planned with these."""
        wanted = self._terms.groups_per_step
        if not self._terms.whole_batches:
            return len(groups) >= wanted
        came = len(groups) + self.dropped + self._source.passed_over - self._passed_before
        if not groups:
            if came >= wanted:  # a batch that teaches nothing makes no step; the next one begins
                self.dropped, self._passed_before = 0, self._source.passed_over
            return False
        if came >= wanted:
            return True
        self._quiet = self._quiet + 1 if self._source.all_arrived() else 0
        return self._quiet >= 2


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

    def __iter__(self) -> Iterator[dict[str, StepPlan]]:
        while True:
            plan = self._share(self._next_plan() if self.source is not None else None)
            if plan is None:
                self._stop.set()
                return
            yield {"plan": plan}

    def _next_plan(self) -> StepPlan | None:
        assert self.source is not None
        began = time.monotonic()
        groups: list[GroupRows] = []
        given_up = 0
        arrival = Arrival(self.source, self.terms)
        while not arrival.complete(groups):
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
                arrival.dropped += 1
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
