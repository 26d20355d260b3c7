"""A rollout's public form: what the administration API and the viewer both show of a record and its turn counts."""

from __future__ import annotations

from turngate.proxy import wire
from turngate.proxy.store.records import RolloutRecord


def rollout_info(
    record: RolloutRecord, *, turns: int, breaks: int, prompt_tokens: int, completion_tokens: int
) -> wire.RolloutInfo:
    """`record` with the counts of its turns."""
    return wire.RolloutInfo(
        id=record.id,
        task=record.new.task,
        group=record.new.group,
        harness=record.new.harness,
        policy=record.policy,
        version=record.version,
        state="finished" if record.state == "finished" else "open",
        outcome=record.outcome,
        cause=record.cause,
        reward=record.reward,
        rewards=dict(record.rewards),
        metrics=dict(record.metrics),
        metadata=record.new.metadata,
        created_at_ns=record.created_at_ns,
        finished_at_ns=record.finished_at_ns,
        turns=turns,
        breaks=breaks,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        replaced=record.replaced,
        trained_labels=record.new.trained_labels,
    )
