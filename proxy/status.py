"""`GET /status` and a rollout's public form: small summaries put together from both stores."""

from __future__ import annotations

from turngate.proxy import wire
from turngate.proxy.gateway import Gateway
from turngate.proxy.rollout_info import rollout_info
from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.store.turnstore import TurnCounts


def status(gateway: Gateway) -> wire.Status:
    """The run's summary now."""
    control, turns = gateway.control.summary(), gateway.turns.counts()
    return wire.Status(
        run=gateway.control.run_id(),
        open_rollouts=control.open_rollouts,
        finished_rollouts=control.finished_rollouts,
        scored_rollouts=control.scored_rollouts,
        unscorable=control.unscorable,
        turns=turns.turns,
        spliced=turns.spliced,
        breaks=dict(turns.breaks),
        generated_tokens=turns.completion_tokens,
        groups=control.groups,
        reward_mean_last=control.reward_mean_last,
        policies=gateway.policies.infos(),
    )


def counted_info(record: RolloutRecord, counts: TurnCounts) -> wire.RolloutInfo:
    """A rollout as the administration API shows it."""
    return rollout_info(
        record,
        turns=counts.turns,
        breaks=sum(counts.breaks.values()),
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.completion_tokens,
    )
