"""The administration wire: pydantic models of every body that runners and trainers exchange with the gateway.

Server (`app.py`) and client (`client.py`) share them, so the two cannot drift. Token arrays travel as base64 of
little-endian arrays: exact, and 5 times smaller to parse than JSON lists.
"""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from turngate.proxy.plain import plain
from turngate.proxy.rows import Row
from turngate.proxy.turns import Label

Outcome = Literal["scored", "unscorable", "cancelled"]
GroupFate = Literal["trained", "zero_variance", "dropped"]


class Wire(BaseModel):
    """Base of all wire models: unknown keys are errors, so a typo never passes silently."""

    model_config = ConfigDict(extra="forbid")


MAX_COUNT = 2**53 - 1
"""Largest whole number that every JSON reader keeps exactly."""

MAX_WAIT_S = 1e9
"""Longest time to wait for anything, in seconds (31 years): what stands for "no limit"."""


_FREE = frozenset({"metadata", "metrics", "rows"})  # values that nothing here reads


class Asked(Wire):
    """Base of request bodies: what is kept must be writable again, so half characters and NaN in free values go."""

    @model_validator(mode="before")
    @classmethod
    def _writable(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: plain(one, nulls=key in _FREE) for key, one in value.items()}


class Budgets(Wire):
    """Limits of one session; None means no limit."""

    max_requests: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_generated_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    max_wall_s: float | None = Field(default=None, gt=0, le=MAX_WAIT_S)
    max_concurrency: int | None = Field(default=None, ge=1, le=MAX_COUNT)


class NewRollout(Asked):
    """`POST /rollouts`. `sampling` wins over what the agent sends; `training` sessions refuse `n > 1`."""

    task: str = Field(min_length=1, max_length=512)
    group: str | None = Field(None, max_length=512)
    group_size: int | None = Field(None, ge=1, le=MAX_COUNT, description="scored rollouts the group waits for")
    group_attempts: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="attempts after which the group closes with fewer; default: group_size"
    )
    group_deadline_s: float | None = Field(
        None, gt=0, le=MAX_WAIT_S, description="after this the group is scored from >= 2 survivors"
    )
    harness: str = "unknown"
    policy: str | None = Field(None, description="default: the gateway's own policy alias")
    pin: Literal["rollout", "turn"] = "rollout"
    history: Literal["template", "append"] = "template"
    training: bool = True
    trained_labels: list[Label] = Field(["main"], description="labels of turns that are trained; may add subagent")
    main_tools: bool | None = Field(
        None, description="whether the agent's main conversation offers tools; default: seen from its requests"
    )
    sampling: dict[str, Any] = Field(default_factory=dict)
    top_logprobs: int = Field(0, ge=0, le=20, description="how many alternatives a token to record")
    budgets: Budgets = Budgets()
    deadline_s: float | None = Field(None, gt=0, le=MAX_WAIT_S)
    metadata: dict[str, Any] = Field(default_factory=dict)


class RolloutCreated(Wire):
    """What an agent needs: put `base_url` and `api_key` where its OpenAI settings are."""

    id: str
    base_url: str
    api_key: str
    policy: str
    version: int


class FinishRollout(Asked):
    """`POST /rollouts/{id}/finish`. A `scored` rollout needs a finite reward; others need a `cause`."""

    reward: float | None = Field(None, allow_inf_nan=False)
    rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)
    outcome: Outcome = "scored"
    cause: str | None = None
    replaced: bool = Field(False, description="another attempt takes its place: it does not count towards its group")


class RolloutInfo(Wire):
    """One rollout as listed and shown. Times are UTC ns."""

    id: str
    task: str
    group: str | None
    harness: str
    policy: str
    version: int
    state: Literal["open", "finished"]
    outcome: Outcome | None
    cause: str | None
    reward: float | None
    rewards: dict[str, float]
    metrics: dict[str, Any]
    metadata: dict[str, Any]
    created_at_ns: int
    finished_at_ns: int | None
    turns: int
    breaks: int
    prompt_tokens: int
    completion_tokens: int
    replaced: bool = Field(False, description="another attempt took its place")
    trained_labels: list[Label] = ["main"]


class WireRow(Wire):
    """A `Row` on the wire: base64 of `ids int32[N]`, `mask uint8[N]`, `logprobs float32[N]`, `versions int32[N]`."""

    rollout: str
    turns: list[str]
    ids: str
    mask: str
    logprobs: str
    versions: str

    @classmethod
    def pack(cls, row: Row) -> WireRow:
        """The wire form of `row`."""
        return cls(
            rollout=row.rollout,
            turns=list(row.turns),
            ids=_pack(row.ids, "<i4"),
            mask=_pack(row.mask, "u1"),
            logprobs=_pack(row.logprobs, "<f4"),
            versions=_pack(row.versions, "<i4"),
        )

    def unpack(self) -> Row:
        """The `Row` this stands for."""
        return Row(
            self.rollout,
            tuple(self.turns),
            _unpack(self.ids, "<i4").astype(np.int32),
            _unpack(self.mask, "u1").astype(np.bool_),
            _unpack(self.logprobs, "<f4").astype(np.float32),
            _unpack(self.versions, "<i4").astype(np.int32),
        )


class LeasedRollout(Wire):
    """One rollout of a leased group; `rows` is empty when it is not `scored`."""

    id: str
    outcome: Outcome
    cause: str | None
    reward: float | None
    rewards: dict[str, float]
    version: int
    rows: list[WireRow]


class LeasedGroup(Wire):
    """A whole group: all its rollouts, scored or not."""

    id: str
    task: str
    rollouts: list[LeasedRollout]


class NewLease(Asked):
    """`POST /leases`: up to `max_groups` finished groups of `policy`, oldest first, for `ttl_s` seconds."""

    policy: str
    max_groups: int = Field(1, ge=1, le=MAX_COUNT)
    ttl_s: float = Field(300.0, gt=0, le=MAX_WAIT_S)


class Lease(Wire):
    """An empty `groups` means: nothing is ready, ask again; `lease` and `epoch` are then empty and 0."""

    lease: str
    epoch: int
    groups: list[LeasedGroup]


class Heartbeat(Asked):
    """`POST /leases/{lease}/heartbeat`: extend by `ttl_s`."""

    epoch: int
    ttl_s: float = Field(300.0, gt=0, le=MAX_WAIT_S)


class GroupAck(Asked):
    """What became of a leased group. `rows` holds per-row statistics the trainer wants kept with the run."""

    group: str
    fate: GroupFate
    cause: str | None = None
    rows: list[dict[str, Any]] = Field(default_factory=list)


class AckLease(Asked):
    """`POST /leases/{lease}/ack`: provisional until a checkpoint of step >= `step` is made durable."""

    epoch: int
    step: int = Field(
        ge=0, le=MAX_COUNT, description="the optimizer step these groups were (or would have been) trained in"
    )
    groups: list[GroupAck]


class DurableStep(Asked):
    """`POST /checkpoints`: the checkpoint of `step` is safely on disk; acknowledgements up to it are final."""

    policy: str
    step: int = Field(ge=0, le=MAX_COUNT)
    path: str


class Resume(Asked):
    """`POST /resume`: training goes on from `step`; groups acknowledged later, or still leased, are leased again."""

    policy: str
    step: int = Field(ge=0, le=MAX_COUNT)


class Resumed(Wire):
    """How many groups went back to be leased again."""

    returned_groups: int


class PublishAdapter(Asked):
    """`POST /adapters`: load the LoRA folder `path` on every replica under a new version, then route to it."""

    policy: str
    path: str
    step: int = Field(ge=0, le=MAX_COUNT)


class AdapterInfo(Wire):
    """One version of a policy. `state`: allocated, loading, live, retired (unloaded) or failed."""

    policy: str
    version: int
    name: str
    path: str
    step: int
    state: Literal["loading", "live", "retired", "failed"]
    cause: str | None
    published_at_ns: int
    sessions: int = Field(0, description="open sessions pinned to it")


class PolicyInfo(Wire):
    """A policy alias: which version new sessions get, and all versions not yet retired."""

    policy: str
    base_model: str
    version: int
    live: list[AdapterInfo]


class Status(Wire):
    """`GET /status`: one small summary for progress displays."""

    run: str
    open_rollouts: int
    finished_rollouts: int
    scored_rollouts: int
    unscorable: dict[str, int]
    turns: int
    spliced: int
    breaks: dict[str, int]
    generated_tokens: int
    groups: dict[str, int] = Field(description="by state: open, ready, leased, trained, zero_variance, dropped")
    reward_mean_last: float | None = Field(description="mean reward of the last 32 scored rollouts")
    policies: list[PolicyInfo]


def _pack(array: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode("ascii")


def _unpack(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
