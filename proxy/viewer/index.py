"""The list of rollouts in memory: filters, order, pages and the run's summary, as pure functions on values.

Ten thousand rollouts are a few MB, so one list read when the store changed answers every filter at once. Turns, which
are large, are never kept here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from turngate.proxy.viewer.reader import StoreReader
from turngate.proxy.wire import AdapterInfo, RolloutInfo

SOLVED_REWARD = 1.0
ADVANTAGE_EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class Filters:
    """What the list shows. Empty means any; rewards are inclusive; `breaks` is "", "yes" or "no"."""

    task: str = ""
    harness: str = ""
    outcome: str = ""
    reward_min: float | None = None
    reward_max: float | None = None
    version: int | None = None
    breaks: str = ""
    label: str = ""
    cause: str = ""
    text: str = ""


SORTS: Mapping[str, Callable[[RolloutInfo], Any]] = {
    "created": lambda info: info.created_at_ns,
    "task": lambda info: info.task,
    "reward": lambda info: (info.reward is not None, info.reward or 0.0),
    "version": lambda info: info.version,
    "turns": lambda info: info.turns,
    "breaks": lambda info: info.breaks,
    "tokens": lambda info: info.completion_tokens,
    "duration": lambda info: duration_ns(info) or 0,
}


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole run in numbers. `breaks` is by cause; `solve_rate` and `reward_mean` are over scored rollouts."""

    rollouts: int
    open: int
    scored: int
    unscorable: Mapping[str, int]
    solved: int
    solve_rate: float | None
    reward_mean: float | None
    turns: int
    spliced: int
    breaks: Mapping[str, int]
    labels: Mapping[str, int]
    prompt_tokens: int
    completion_tokens: int
    groups: int

    @property
    def continued(self) -> int:
        """Turns that go on from an earlier one: spliced, or with a history that was rewritten."""
        return self.spliced + sum(self.breaks.values())


@dataclass(frozen=True, slots=True)
class VersionLine:
    """One policy version: when it was published and what its rollouts got."""

    policy: str
    version: int
    info: AdapterInfo | None
    rollouts: int
    scored: int
    reward_mean: float | None


@dataclass(frozen=True, slots=True)
class Index:
    """Everything the list pages need; `rollouts` newest first."""

    rollouts: Sequence[RolloutInfo]
    by_id: Mapping[str, RolloutInfo]
    labels: Mapping[str, frozenset[str]]
    causes: Mapping[str, frozenset[str]]
    groups: Mapping[str, Sequence[RolloutInfo]]
    versions: Sequence[VersionLine]
    summary: Summary


def build_index(reader: StoreReader) -> Index:
    """Read the lists once and arrange them."""
    rollouts = sorted(reader.rollouts(), key=lambda info: (info.created_at_ns, info.id), reverse=True)
    labels: dict[str, set[str]] = defaultdict(set)
    causes: dict[str, set[str]] = defaultdict(set)
    by_kind: Counter[str] = Counter()
    by_cause: Counter[str] = Counter()
    by_label: Counter[str] = Counter()
    for count in reader.turn_counts():
        labels[count.rollout].add(count.label)
        by_kind[count.kind] += count.turns
        by_label[count.label] += count.turns
        if count.kind == "break":
            cause = count.break_cause or "unknown"
            causes[count.rollout].add(cause)
            by_cause[cause] += count.turns
    groups: dict[str, list[RolloutInfo]] = defaultdict(list)
    for info in reversed(rollouts):
        if info.group is not None:
            groups[info.group].append(info)
    scored = [info.reward for info in rollouts if info.outcome == "scored" and info.reward is not None]
    solved = sum(reward >= SOLVED_REWARD for reward in scored)
    summary = Summary(
        rollouts=len(rollouts),
        open=sum(info.state == "open" for info in rollouts),
        scored=len(scored),
        unscorable=_counted(
            info.cause or "unknown" for info in rollouts if info.outcome in ("unscorable", "cancelled")
        ),
        solved=solved,
        solve_rate=solved / len(scored) if scored else None,
        reward_mean=fmean(scored) if scored else None,
        turns=by_kind.total(),
        spliced=by_kind["spliced"],
        breaks=dict(by_cause.most_common()),
        labels=dict(by_label.most_common()),
        prompt_tokens=sum(info.prompt_tokens for info in rollouts),
        completion_tokens=sum(info.completion_tokens for info in rollouts),
        groups=len(groups),
    )
    return Index(
        rollouts=rollouts,
        by_id={info.id: info for info in rollouts},
        labels={rollout: frozenset(some) for rollout, some in labels.items()},
        causes={rollout: frozenset(some) for rollout, some in causes.items()},
        groups=groups,
        versions=_version_lines(rollouts, reader.adapters()),
        summary=summary,
    )


def select(index: Index, filters: Filters, sort: str, descending: bool) -> list[RolloutInfo]:
    """The rollouts that pass `filters`, in order; an unknown `sort` means `created`."""
    chosen = [info for info in index.rollouts if _passes(index, info, filters)]
    key = SORTS.get(sort, SORTS["created"])
    return sorted(chosen, key=key, reverse=descending)


def facets(index: Index) -> dict[str, list[tuple[str, int]]]:
    """For each filter with few values: its values and how many rollouts have them, most frequent first."""
    by_label: Counter[str] = Counter()
    for some in index.labels.values():
        by_label.update(some)
    by_cause: Counter[str] = Counter()
    for some in index.causes.values():
        by_cause.update(some)
    return {
        "task": sorted(_counted(info.task for info in index.rollouts).items()),
        "harness": list(_counted(info.harness for info in index.rollouts).items()),
        "outcome": list(_counted(outcome_word(info) for info in index.rollouts).items()),
        "version": sorted(((str(v), n) for v, n in Counter(i.version for i in index.rollouts).items()), key=_as_number),
        "label": by_label.most_common(),
        "cause": by_cause.most_common(),
    }


def advantages(group: Sequence[RolloutInfo]) -> dict[str, float | None]:
    """(r - mean) / (std + 1e-4) over the scored rollouts of a group (std of the group itself); None without a reward.

    The trainer's own numbers may differ where a group was scored from survivors at its deadline.
    """
    scored = {info.id: info.reward for info in group if info.outcome == "scored" and info.reward is not None}
    if len(scored) < 2:
        return {info.id: None for info in group}
    mean, spread = fmean(scored.values()), pstdev(scored.values())
    return {
        info.id: (scored[info.id] - mean) / (spread + ADVANTAGE_EPSILON) if info.id in scored else None
        for info in group
    }


def outcome_word(info: RolloutInfo) -> str:
    """`open`, or the outcome."""
    return info.outcome or "open"


def duration_ns(info: RolloutInfo) -> int | None:
    """From creation to finish; None while open."""
    return None if info.finished_at_ns is None else max(0, info.finished_at_ns - info.created_at_ns)


class IndexCache:
    """The newest index, read again at most every `every_s` seconds and only when the store changed."""

    def __init__(self, reader: StoreReader, clock: Callable[[], float], every_s: float = 1.0) -> None:
        self._reader, self._clock, self._every_s = reader, clock, every_s
        self._index: Index | None = None
        self._state: Hashable = None
        self._read_at_s = float("-inf")

    def state_now(self) -> str:
        """A word for the state of the store now; the same word means nothing was written."""
        return _word(self._reader.state())

    def state_shown(self) -> str:
        """The word of the state that `get` last read."""
        return _word(self._state)

    def get(self) -> Index:
        """The index; stale by at most `every_s`."""
        now_s = self._clock()
        if self._index is not None and now_s - self._read_at_s < self._every_s:
            return self._index
        state = self._reader.state()
        if self._index is None or state != self._state:
            self._index, self._state = build_index(self._reader), state
        self._read_at_s = now_s
        return self._index


def _word(state: Hashable) -> str:
    return f"{hash(state) & 0xFFFFFFFFFFFF:012x}"


def _passes(index: Index, info: RolloutInfo, filters: Filters) -> bool:
    if filters.reward_min is not None and (info.reward is None or info.reward < filters.reward_min):
        return False
    if filters.reward_max is not None and (info.reward is None or info.reward > filters.reward_max):
        return False
    needle = filters.text.lower()
    return (
        (not filters.task or info.task == filters.task)
        and (not filters.harness or info.harness == filters.harness)
        and (not filters.outcome or outcome_word(info) == filters.outcome)
        and (filters.version is None or info.version == filters.version)
        and (filters.breaks not in ("yes", "no") or (info.breaks > 0) == (filters.breaks == "yes"))
        and (not filters.label or filters.label in index.labels.get(info.id, ()))
        and (not filters.cause or filters.cause in index.causes.get(info.id, ()))
        and (not needle or needle in f"{info.id} {info.task} {info.group} {info.cause}".lower())
    )


def _version_lines(rollouts: Sequence[RolloutInfo], adapters: Sequence[AdapterInfo]) -> list[VersionLine]:
    published = {(info.policy, info.version): info for info in adapters}
    sampled: dict[tuple[str, int], list[RolloutInfo]] = defaultdict(list)
    for info in rollouts:
        sampled[info.policy, info.version].append(info)
    lines = []
    for policy, version in sorted(published.keys() | sampled.keys()):
        some = sampled.get((policy, version), [])
        rewards = [info.reward for info in some if info.outcome == "scored" and info.reward is not None]
        mean = fmean(rewards) if rewards else None
        lines.append(VersionLine(policy, version, published.get((policy, version)), len(some), len(rewards), mean))
    return lines


def _counted(values: Any) -> dict[str, int]:
    return dict(Counter(values).most_common())


def _as_number(item: tuple[str, int]) -> int:
    return int(item[0])
