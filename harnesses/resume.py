"""Going on where a runner that died was: what it finished is taken as it is, what it left open is closed and run again.

The gateway knows better than the folder: a rollout that was finished there but not written down here is taken from it,
and results of another gateway's store do not count. Nothing that was scored is ever run again.
"""

from __future__ import annotations

from collections.abc import Mapping

from turngate.harnesses.errors import Fault
from turngate.harnesses.groups import Group, Plan, Slot
from turngate.harnesses.journal import Journal
from turngate.harnesses.rollout import Ending, Result, Stage, close_cancelled
from turngate.proxy.wire import RolloutInfo

Results = Mapping[tuple[str, int], Result]
GONE = Ending("runner_stopped", replaced=True)


async def take_up(stage: Stage, plan: Plan, journal: Journal) -> list[Result]:
    """Close what an earlier runner of this run left open, restore its groups in `plan`; its results.

    Raises:
        Fault: the gateway cannot be asked about groups that were not complete.
    """
    groups = journal.groups(plan.tasks)
    if not groups:
        return []
    await close_left_open(stage)
    kept = journal.results()
    found: list[Result] = []
    for group in groups:
        results = {index: kept[group.name, index] for index in group.pending if (group.name, index) in kept}
        if not _complete(group, results):
            results = await _ask(stage, group, results, journal)
        group.scored = sum(result.outcome == "scored" for result in results.values())
        done = _complete(group, results)
        group.pending = [] if done else [index for index in group.pending if index not in results]
        found += results.values()
    plan.restore(groups)
    return found


async def close_left_open(stage: Stage) -> int:
    """Close the sessions of this run that are open at the gateway although no rollout of it runs; how many."""
    try:
        left = [one for one in await stage.gateway.open_rollouts() if one.metadata.get("runner") == stage.run]
    except Fault:
        return 0
    return sum([await close_cancelled(stage.gateway, one.id, GONE) for one in left])


def _complete(group: Group, results: Mapping[int, Result]) -> bool:
    scored = sum(result.outcome == "scored" for result in results.values())
    return scored >= group.size or len(results) >= group.attempts


async def _ask(stage: Stage, group: Group, kept: dict[int, Result], journal: Journal) -> dict[int, Result]:
    """The results of an incomplete group, as the gateway has them."""
    told = [one for one in await stage.gateway.group_rollouts(group.name) if one.state == "finished"]
    known = {one.id for one in told}
    results = {index: result for index, result in kept.items() if result.id is None or result.id in known}
    for one in told:
        index = one.metadata.get("slot")
        counts = not one.replaced and one.metadata.get("runner") == stage.run
        if counts and isinstance(index, int) and index not in results:
            results[index] = _result(one)
            journal.ended(Slot(group.task, group.name, index), results[index])
    return results


def _result(info: RolloutInfo) -> Result:
    """A result that its runner did not live to write down."""
    seconds = max(0, (info.finished_at_ns or info.created_at_ns) - info.created_at_ns) / 1e9
    assert info.outcome is not None, "finished rollouts have an outcome"
    return Result(
        id=info.id,
        task=info.task,
        group=info.group or "",
        outcome=info.outcome,
        reward=info.reward,
        cause=info.cause,
        detail="taken from the gateway: the runner died before it wrote this down",
        seconds=round(seconds, 3),
        version=info.version,
        turns=info.turns,
        notes=info.metrics,
    )
