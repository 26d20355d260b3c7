"""The administration wire: pydantic models of every body that runners and trainers exchange with the gateway.

Server (`app.py`) and client (`client.py`) share them, so the two cannot drift. Token arrays travel as base64 of
little-endian arrays: exact, and 5 times smaller to parse than JSON lists.
"""

from __future__ import annotations

import base64
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, model_validator

from turngate.proxy.rows import Row
from turngate.proxy.wire_base import MAX_COUNT, MAX_WAIT_S, Sent, Wire
from turngate.proxy.wire_base import Asked as Asked
from turngate.proxy.wire_teachers import OpenAITeacher as OpenAITeacher
from turngate.proxy.wire_teachers import SaidCall as SaidCall
from turngate.proxy.wire_teachers import SaidTurn as SaidTurn
from turngate.proxy.wire_teachers import ScriptTeacher as ScriptTeacher
from turngate.proxy.wire_teachers import Upstream as Upstream

API_VERSION = "1"
"""The version of everything in this module. It grows when an existing body or answer changes its meaning."""

API_HEADER = "turngate-api-version"
"""Administration answers carry it; a request that carries it is refused where the versions differ."""

TrainedLabel = Literal["main", "subagent", "compaction"]
"""What may be trained: a reward for the task says nothing of a title or a probe, so side calls never are."""

SAMPLING_KEYS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "top_k", "seed", "min_tokens", "stop", "stop_token_ids", "max_tokens", "logit_bias", "bad_words",
)  # fmt: skip
"""What a session's sampling may set; the gateway refuses to open a session with any other key."""

Outcome = Literal["scored", "unscorable", "cancelled"]
GroupFate = Literal["trained", "zero_variance", "dropped"]


class Problem(Wire):
    """What was wrong, and what to do about it; `code` is stable, `param` names a field of the body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Wire):
    """Every answer that is an error, in OpenAI's shape."""

    error: Problem


class Budgets(Sent):
    """Limits of one session; None means no limit. A spent one ends the agent's run, concurrency apart (429)."""

    max_requests: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="model calls, those of sub-agents and titles too"
    )
    max_generated_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="sampled tokens of all turns; what is left of them limits the next turn"
    )
    max_context_tokens: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="prompt and answer of one turn: a smaller context than the engine's"
    )
    max_wall_s: float | None = Field(None, gt=0, le=MAX_WAIT_S, description="time since the session was created")
    max_concurrency: int | None = Field(None, ge=1, le=MAX_COUNT, description="requests in flight; more get 429")


class NewRollout(Asked):
    """`POST /rollouts`. `sampling` wins over what the agent sends; `training` sessions refuse `n > 1`."""

    task: str = Field(min_length=1, max_length=512, description="name of the task, the same for all of a group")
    group: str | None = Field(None, max_length=512, description="id of the group; none: the rollout is never leased")
    group_size: int | None = Field(None, ge=1, le=MAX_COUNT, description="scored rollouts the group waits for")
    group_attempts: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="attempts after which the group closes with fewer; default: group_size"
    )
    group_deadline_s: float | None = Field(
        None, gt=0, le=MAX_WAIT_S, description="after this the group is scored from >= 2 survivors"
    )
    harness: str = Field("unknown", description="what drives it, for the record")
    policy: str | None = Field(None, description="default: the gateway's own policy alias")
    pin: Literal["rollout", "turn"] = Field(
        "rollout", description="rollout: one adapter version from beginning to end; turn: each turn takes the newest"
    )
    version: int | None = Field(
        None,
        ge=0,
        le=MAX_COUNT,
        description="an evaluation's adapter version, still live, or 0 for the base; default: the current one",
    )
    history: Literal["template", "append"] = Field(
        "template",
        description="where a chat template would rewrite earlier turns: follow it (a break), or keep the tokens",
    )
    training: bool = Field(True, description="false: an evaluation, never leased; n > 1 and forced tools are allowed")
    trained_labels: list[TrainedLabel] = Field(
        ["main"], description="labels of turns that are trained; may add subagent; side calls never are"
    )
    main_tools: bool | None = Field(
        None, description="whether the agent's main conversation offers tools; default: seen from its requests"
    )
    sampling: dict[str, Any] = Field(
        default_factory=dict, description="temperature, top_p, top_k, min_p, penalties, seed, max_tokens, …"
    )
    upstream: Upstream | None = Field(
        None, description="a teacher that answers instead of the policy: a demonstration; needs training=false"
    )
    top_logprobs: int = Field(0, ge=0, le=20, description="how many alternatives a token to record")
    budgets: Budgets = Field(Budgets(), description="what the agent may spend; a spent one ends its run")
    deadline_s: float | None = Field(None, gt=0, le=MAX_WAIT_S, description="after this the agent's run ends")
    metadata: dict[str, Any] = Field(default_factory=dict, description="yours; kept and given back")

    @model_validator(mode="after")
    def _demonstrations_are_not_trained(self) -> Self:
        if self.upstream is not None and self.training:
            raise ValueError("a rollout with an upstream is a demonstration: it has no log-probs; say training=false")
        return self


class RolloutCreated(Wire):
    """What an agent needs: put `base_url` and `api_key` where its OpenAI settings are."""

    id: str
    base_url: str = Field(description="an OpenAI base URL, the secret in it")
    api_key: str = Field(description="the secret alone, for agents that have a key but no path")
    policy: str
    version: int = Field(description="the adapter version it is pinned to; 0 is the base model")


class FinishRollout(Asked):
    """`POST /rollouts/{id}/finish`. A `scored` rollout needs a finite reward; others need a `cause`."""

    reward: float | None = Field(None, allow_inf_nan=False, description="what training compares within the group")
    rewards: dict[str, FiniteFloat] = Field(default_factory=dict, description="its parts, by name, for the record")
    metrics: dict[str, Any] = Field(default_factory=dict, description="yours; kept and given back")
    outcome: Outcome = Field("scored", description="unscorable: a fault of yours or the sandbox's, no reward")
    cause: str | None = Field(None, description="why it was not scored, in a word or two")
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
    trained_labels: list[TrainedLabel] = Field(["main"])


class Answers(Wire):
    """What a rollout's answers were like, over all its turns."""

    turns: int
    tool_calls: int = Field(description="tool calls in all answers together")
    truncated: int = Field(description="answers cut by a token limit")
    empty: int = Field(description="answers with neither text nor a tool call, not cut")
    completion_tokens: int


class WireRow(Wire):
    """A `Row` on the wire: base64 of `ids int32[N]`, `mask uint8[N]`, `logprobs float32[N]`, `versions int32[N]`."""

    rollout: str
    turns: list[str] = Field(description="ids of the turns whose tokens it trains, the first one first")
    ids: str = Field(description="the tokens, prompt and completions, as the engine saw and sampled them")
    mask: str = Field(description="1 where a token was sampled and is to be trained in this row")
    logprobs: str = Field(description="natural log of the probability it was sampled with; 0 where mask is 0")
    versions: str = Field(description="adapter version that sampled it; -1 where mask is 0")

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
    max_groups: int = Field(1, ge=1, le=MAX_COUNT, description="at most so many; fewer when fewer are ready")
    ttl_s: float = Field(300.0, gt=0, le=MAX_WAIT_S, description="without a heartbeat the groups are free after this")


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
    fate: GroupFate = Field(description="zero_variance: all rewards equal; dropped: left out, with the cause")
    cause: str | None = Field(None, description="why it was dropped")
    rows: list[dict[str, Any]] = Field(default_factory=list, description="statistics a row, kept with the run")


class AckLease(Asked):
    """`POST /leases/{lease}/ack`: provisional until a checkpoint of step >= `step` is made durable."""

    epoch: int = Field(description="the lease's; an older one is refused with 409")
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


class CloseGroups(Asked):
    """`POST /groups/close`: the run is over; groups of `policy` that nobody will train any more get their end."""

    policy: str
    cause: str = Field("run_ended", min_length=1, max_length=200, description="why they are dropped")


class GroupsClosed(Wire):
    """How many groups were dropped."""

    dropped_groups: int


class PublishAdapter(Asked):
    """`POST /adapters`: load the LoRA folder `path` on every replica under a new version, then route to it."""

    policy: str
    path: str = Field(description="a folder in peft's format that every engine can read under this path")
    step: int = Field(ge=0, le=MAX_COUNT, description="the optimizer step these weights are of")
    max_staleness: int | None = Field(
        None,
        ge=0,
        le=MAX_COUNT,
        description="tokens sampled more versions ago than this are not trained: open training rollouts pinned to such "
        "a version are cancelled as `stale`, for nobody can use them any more",
    )


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
