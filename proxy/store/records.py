"""What the control store answers with: rollouts, groups, grants and adapter versions, as frozen values.

Kept apart from the SQL so that sessions, viewer, verify and export can name them without it. Times are UTC ns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from turngate.proxy.wire import NewRollout, Outcome

RolloutState = Literal["open", "finished"]


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout. `version` is the policy version it is pinned to (0: base), `worker` whose turn file it is in.

    `member` says that it is one of the rollouts its group is scored from. `sealed_turns` and `seal` are how many
    turns it had when it finished, and a digest over them; None when it was finished without.
    """

    id: str
    new: NewRollout
    policy: str
    version: int
    state: RolloutState
    outcome: Outcome | None
    cause: str | None
    reward: float | None
    rewards: Mapping[str, float]
    metrics: Mapping[str, Any]
    created_at_ns: int
    finished_at_ns: int | None
    member: bool
    sealed_turns: int | None
    seal: bytes | None
    replaced: bool = False
    worker: int = 0


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Which rollouts to list, newest first; None means any. `after` is the id of the last one of the page before,
    in the order asked for."""

    state: RolloutState | None = None
    outcome: Outcome | None = None
    task: str | None = None
    harness: str | None = None
    group: str | None = None
    policy: str | None = None
    version: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    training: bool | None = None
    after: str | None = None
    limit: int = 100
    oldest_first: bool = False


@dataclass(frozen=True, slots=True)
class Seal:
    """What a rollout's turns were when it finished: their number, and a digest over their digests in order."""

    turns: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """One group. It waits for `size` scored rollouts, or for `attempts` ended ones; `step` is the optimizer step that
    used it."""

    id: str
    task: str
    policy: str
    size: int
    attempts: int | None
    state: str
    cause: str | None
    lease: str | None
    step: int | None
    deadline_ns: int | None
    created_at_ns: int
    ready_at_ns: int | None


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What became of a group: its `state`, the step and cause of it, and how many acknowledgements stand."""

    id: str
    task: str
    state: str
    step: int | None
    cause: str | None
    acks: int


class LeaseGrant(NamedTuple):
    """Groups given to a trainer, oldest first; no groups, no lease (`id` empty, `epoch` 0)."""

    id: str
    epoch: int
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ControlSummary:
    """The control store's part of `wire.Status`."""

    open_rollouts: int
    finished_rollouts: int
    scored_rollouts: int
    unscorable: dict[str, int]
    groups: dict[str, int]
    reward_mean_last: float | None
