"""The end of a run in figures: what the store proves, what the gateway counted, what the trainer logged.

`turngate verify` runs as a process of its own, so the proof does not depend on this one's view. It must never fill a
figure in from a plan or a setting.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from turngate.proxy import wire
from turngate.trainer.alarms import name_of
from turngate.trainer.errors import TrainerError

CLI = (sys.executable, "-m", "turngate.proxy.cli")
"""How a part is started: this interpreter's own `turngate`, wherever the script of that name is."""

KEYS = (
    "rollouts",
    "turns",
    "spliced",
    "breaks",
    "rows",
    "exact_rows",
    "groups_trained",
    "groups_scheduled",
    "groups_zero_variance",
    "groups_dropped",
    "restarts",
    "alarms",
    "steps",
    "adapter_versions",
    "generated_tokens",
    "trained_tokens",
    "reward_first",
    "reward_last",
    "store",
)


NO_GROUPS: Mapping[str, Any] = {"ok": True, "scheduled": 0, "zero_variance": 0, "dropped": 0, "problems": []}
"""The lineage of a run whose store knows of no group."""


class SummaryError(TrainerError):
    """The store could not be checked at all."""


@dataclass(frozen=True)
class Report:
    """What `turngate verify` found; `sound` is its exit status 0."""

    sound: bool
    figures: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Summary:
    """The summary's values under `KEYS`, in that order."""

    values: dict[str, Any]

    def print_table(self) -> None:
        """Name and value, a line each."""
        table = Table(title="summary", title_justify="left", show_header=False)
        for name, value in self.values.items():
            table.add_row(name.replace("_", " "), f"{value:.4f}" if isinstance(value, float) else str(value))
        Console(highlight=False, soft_wrap=True).print(table)


def verify_store(store: Path) -> Report:
    """Run `turngate verify` on a closed store. Raises SummaryError when it prints no figures."""
    command = [*CLI, "verify", str(store), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    try:
        figures = json.loads(done.stdout)
    except ValueError as error:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise SummaryError(f"`turngate verify {store}` ended with status {done.returncode}: {said}") from error
    return Report(done.returncode == 0, figures, done.stderr)


def lineage_of(run: Path) -> dict[str, Any]:
    """What `turngate lineage` says of a run's groups. Raises SummaryError when it says nothing."""
    done = subprocess.run(
        [*CLI, "lineage", str(run), "--json"], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode not in (0, 1):
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise SummaryError(f"`turngate lineage {run}` ended with status {done.returncode}: {said}")
    return found[0] if found else dict(NO_GROUPS)


def summarise(
    status: wire.Status | None,
    report: Report,
    metrics: list[dict[str, Any]],
    store: Path,
    lineage: Mapping[str, Any],
    restarts: Mapping[str, int],
    alarms: Sequence[str],
) -> Summary:
    """Put the figures together; a step done twice (after a resume) counts as it was done last.

    `rollouts` are the scored ones: those that the end of the run cut off are in no figure but turns and tokens.
    """
    by_step = {int(line["step"]): line for line in metrics}
    steps = sorted(by_step)
    figures = report.figures
    values: dict[str, Any] = {
        "rollouts": status.scored_rollouts if status else figures["rollouts"],
        "turns": figures["turns"],
        "spliced": figures["spliced"],
        "breaks": sum(figures["breaks"].values()),
        "rows": figures["rows"],
        "exact_rows": figures["exact_rows"],
        "groups_trained": sum(int(by_step[step].get("groups", 0)) for step in steps),
        "groups_scheduled": lineage["scheduled"],
        "groups_zero_variance": lineage["zero_variance"],
        "groups_dropped": lineage["dropped"],
        "restarts": dict(restarts),
        "alarms": dict(Counter(map(name_of, alarms))),
        "steps": steps[-1] if steps else 0,
        "adapter_versions": len({line["version"] for line in metrics if line.get("version")}),
        "generated_tokens": status.generated_tokens if status else figures["sampled_tokens"],
        "trained_tokens": sum(int(by_step[step].get("tokens", 0)) for step in steps),
        "reward_first": by_step[steps[0]].get("reward_mean") if steps else None,
        "reward_last": by_step[steps[-1]].get("reward_mean") if steps else None,
        "store": str(store),
    }
    return Summary({key: values[key] for key in KEYS})
