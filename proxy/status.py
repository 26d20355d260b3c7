"""`GET /status` and a rollout's public form: small summaries put together from both stores."""

from __future__ import annotations

from collections.abc import Sequence

from turngate.proxy import wire
from turngate.proxy.control import Control
from turngate.proxy.rollout_info import rollout_info
from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.store.turnstore import TurnCounts


async def status(control: Control) -> wire.Status:
    """The run's summary now, over all workers."""
    told, turns = control.store.summary(), await control.counts()
    return wire.Status(
        run=control.store.run_id(),
        open_rollouts=told.open_rollouts,
        finished_rollouts=told.finished_rollouts,
        scored_rollouts=told.scored_rollouts,
        unscorable=told.unscorable,
        turns=turns.turns,
        spliced=turns.spliced,
        breaks=dict(turns.breaks),
        generated_tokens=turns.completion_tokens,
        groups=told.groups,
        reward_mean_last=told.reward_mean_last,
        policies=control.policies.infos(),
    )


def infos(control: Control, records: Sequence[RolloutRecord]) -> list[wire.RolloutInfo]:
    """Rollouts as the administration API shows them."""
    counts = control.turns.counts_of(records)
    return [_counted(record, counts[record.id]) for record in records]


def answers(control: Control, record: RolloutRecord) -> wire.Answers:
    """A rollout's answers, counted; reads its turns."""
    turns = control.turns.turns(record)
    calls = [len(turn.response.get("tool_calls") or ()) for turn in turns]
    cut = [turn.finish_reason == "length" for turn in turns]
    said = [made > 0 or bool(turn.response.get("content")) for made, turn in zip(calls, turns, strict=True)]
    return wire.Answers(
        turns=len(turns),
        tool_calls=sum(calls),
        truncated=sum(cut),
        empty=sum(not some and not end for some, end in zip(said, cut, strict=True)),
        completion_tokens=sum(len(turn.completion_ids) for turn in turns),
    )


def _counted(record: RolloutRecord, counts: TurnCounts) -> wire.RolloutInfo:
    return rollout_info(
        record,
        turns=counts.turns,
        breaks=sum(counts.breaks.values()),
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
    )
