"""`turngate lineage`: every group that was scheduled, and the one end that it had in the run's final checkpoint.

Trained in a step, without variance, or dropped for a cause: each once, whatever was killed on the way. Three records
kept by three processes are compared (the runner's journal, the control store, the trainer's checkpoint). It only reads,
and must never take one record's word for another's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngate.proxy.arguments import Parser
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import StoreError, StoreMissing
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.records import GroupOutcome

OK, FAILED, USAGE = 0, 1, 2
ENDS = ("trained", "zero_variance", "dropped")
NEVER_STARTED = "never_started"
"""Cause of a group that the runner had planned, of which no rollout was ever opened."""

HELP = """\
Say what became of each group that the runner began, and check it.

A group ends once: trained in a step of the final checkpoint, without variance, or dropped for a cause. The runner's
journal, the gateway's store and the checkpoint must tell the same; a run that goes on has groups without an end yet."""

EXAMPLES = """\
examples:
  turngate lineage runs/demo                     counts, causes, problems
  turngate lineage runs/demo --json --groups     one JSON object, with every group

exit status: 0 each group has its one end, 1 it has not, 2 no such run or wrong usage"""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The groups of one policy. `step` is the final checkpoint's, 0 without one; `unsettled` have no end yet."""

    policy: str
    step: int
    groups: Sequence[GroupOutcome]
    unsettled: Sequence[str]
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether every group has its one end."""
        return not self.unsettled and not self.problems

    def as_json(self) -> dict[str, Any]:
        """Counts, causes and problems."""
        ends = Counter(group.state for group in self.groups)
        causes = Counter(group.cause for group in self.groups if group.state == "dropped")
        return {
            "ok": self.ok,
            "policy": self.policy,
            "step": self.step,
            "scheduled": len(self.groups),
            **{end: ends[end] for end in ENDS},
            "dropped_for": {str(cause): count for cause, count in causes.most_common()},
            "unsettled": len(self.unsettled),
            "problems": list(self.problems),
        }


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What the newest durable checkpoint says: its step, and the step each group was trained in."""

    step: int = 0
    lineage: Mapping[str, int] = field(default_factory=dict)


def compare(
    policy: str, stored: Sequence[GroupOutcome], scheduled: Iterable[tuple[str, str]], last: Checkpoint
) -> Lineage:
    """Put the three records together.

    Args:
        policy: whose groups they are.
        stored: every group of the control store.
        scheduled: (group, task) of every group the runner wrote down as begun.
        last: the final checkpoint.
    """
    known = {group.id for group in stored}
    never = [(name, task) for name, task in scheduled if name not in known]
    groups = [*stored, *(GroupOutcome(name, task, "dropped", None, NEVER_STARTED, 0) for name, task in never)]
    unsettled = [group.id for group in groups if group.state not in ENDS]
    problems = [problem for group in groups if (problem := _problem(group, last))]
    strange = sorted(last.lineage.keys() - known)
    problems += [f"{name}: in the checkpoint of step {last.step}, unknown to the store" for name in strange]
    taken = set(last.lineage.values())
    problems += [f"step {step}: no group was trained in it" for step in range(1, last.step + 1) if step not in taken]
    return Lineage(policy, last.step, groups, unsettled, problems)


def _problem(group: GroupOutcome, last: Checkpoint) -> str:
    """What is wrong with one group; empty when nothing is."""
    step = last.lineage.get(group.id)
    if group.acks > 1:
        return f"{group.id}: {group.acks} acknowledgements of it stand"
    if group.state == "trained" and group.step != step:
        said = "it is not in it" if step is None else f"there it is of step {step}"
        return f"{group.id}: trained in step {group.step} by the store; the checkpoint of step {last.step}: {said}"
    if group.state != "trained" and step is not None:
        return f"{group.id}: {group.state} by the store, trained in step {step} by the checkpoint"
    if group.state == "dropped" and not group.cause:
        return f"{group.id}: dropped without a cause"
    return ""


def lineages(path: Path) -> list[Lineage]:
    """The lineage of each policy of a run's folder or a store.

    Raises:
        StoreError: there is no store, or it cannot be read.
    """
    folder = StoreFolder.find(path)
    with ControlStore(folder.control, readonly=True) as control:
        policies = control.group_policies()
        stored = {policy: control.outcomes(policy) for policy in policies}
        last = {policy: _checkpoint(folder.path.parent, control.last_durable(policy)) for policy in policies}
    known = {group.id for groups in stored.values() for group in groups}
    never = [entry for entry in _journal(folder.path.parent / "runner" / "journal.jsonl") if entry[0] not in known]
    # A run trains one policy; that is where groups belong of which the store never heard.
    return [
        compare(policy, groups, never if policy == policies[0] else (), last[policy])
        for policy, groups in stored.items()
    ]


def _checkpoint(run: Path, last: tuple[int, str] | None) -> Checkpoint:
    """The checkpoint that the store names; where it was, or in the run's folder if that was moved."""
    if last is None:
        return Checkpoint()
    step, path = last
    for folder in (Path(path), run / "checkpoints" / Path(path).name):
        try:
            return Checkpoint(step, json.loads((folder / "turngate.json").read_text())["lineage"])
        except (OSError, ValueError, KeyError):
            continue
    return Checkpoint(step)


def _journal(path: Path) -> Iterable[tuple[str, str]]:
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # cut by a kill
        if isinstance(line, dict) and "group" in line:
            yield str(line["group"]), str(line["task"])


def lineage_command(argv: Sequence[str]) -> int:
    """Run `turngate lineage`; the exit status (0 ok, 1 problems or groups without an end, 2 usage)."""
    parser = Parser(
        prog="turngate lineage",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's folder, or a store")
    parser.add_argument("--json", action="store_true", help="print one JSON object a policy")
    parser.add_argument("--groups", action="store_true", help="every group as well")
    try:
        options = parser.parse_args(list(argv))
        found = lineages(options.run)
    except SystemExit as stop:
        return int(stop.code or 0)
    except StoreError as error:
        print(f"turngate lineage: {error}", file=sys.stderr)
        return USAGE if isinstance(error, StoreMissing) else FAILED
    for one in found:
        groups = {"groups": [_line(group) for group in one.groups]} if options.groups else {}
        print(json.dumps({**one.as_json(), **groups}) if options.json else _text(one, every=options.groups))
    return OK if all(one.ok for one in found) else FAILED


def _line(group: GroupOutcome) -> dict[str, Any]:
    return {"group": group.id, "task": group.task, "end": group.state, "step": group.step, "cause": group.cause}


def _text(one: Lineage, *, every: bool) -> str:
    told = one.as_json()
    lines = [f"{one.policy}: {told['scheduled']} groups scheduled, final checkpoint of step {one.step}"]
    lines += [f"  {told[end]} {end}" for end in ENDS]
    lines += [f"    {count} × {cause}" for cause, count in told["dropped_for"].items()]
    lines += [f"  {len(one.unsettled)} without an end yet"] if one.unsettled else []
    lines += [f"  ✗ {problem}" for problem in one.problems]
    if every:
        told_step = {group.id: f"step {group.step}" for group in one.groups if group.step is not None}
        lines += [f"{g.id}  {g.state}  {g.cause or told_step.get(g.id, '')}" for g in one.groups]
    return "\n".join(lines)
