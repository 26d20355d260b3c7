#!/usr/bin/env python3
"""Trainer, runner, gateway and engine of one real run are killed again and again: does each group still end once?

    python bench/kills.py --tokenizer FOLDER [--kills 12] [--steps 26] [--parts trainer,gateway] [--seed 0]

`launch.py` with the real vLLM (a tiny model with random weights, CPU), real pi in bubblewrap and the real trainer. One
part at a time gets SIGKILL, at a random moment; all four in turn, in a random order. A step of so small a model is over
in no time, so two of three kills of the trainer come within 1.5 s after it has written an adapter. The kills are spread
over the steps, so the run must reach the end by itself. The last line is one JSON object; exit status 1 when a check
fails:

    status           of launch.py: 0
    steps            optimizer steps of the final checkpoint: all that were planned
    steps_redone     how often a step was made again, its kill having come before its checkpoint was whole
    groups_returned  groups that a restarted trainer gave back to be leased again
    lineage          what `turngate lineage` says: each scheduled group ended once
    exact_rows       of `rows`: `turngate verify` rebuilt them all
    had_current      engine restarts after which the current version was loaded before the gateway called it healthy
    turns_after      turns sampled with an adapter by restarted engines
    orphans          processes, sandboxes' folders, open rollouts, leased groups and adapters that nobody owned: 0
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tiny_model import make_tiny
from turngate.proxy.client import GatewayClient, GatewayError
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.reader import StoreReader
from turngate.trainer.progress import read_metrics

ROOT = Path(__file__).resolve().parent.parent
_RETURNED = re.compile(r"(\d+) groups returned to be leased again")
PARTS = ("engine", "gateway", "runner", "trainer")
MARK = "TURNGATE_KILLS"
LONGEST_WAIT_S = 15.0
"""A kill comes at a random moment within this after its step is reached and all parts are at work."""
UP_WITHIN_S = 900.0
VERIFIER = """#!/bin/sh
# A reward that differs between answers and means nothing.
n=$(cksum < answer.txt | cut -d ' ' -f 1)
echo "$n" | awk '{ printf "%.2f\\n", ($1 % 7) / 6 }' > "${TURNGATE_REWARDS:-/logs/verifier}/reward.txt"
"""


@dataclass
class Kill:
    """One SIGKILL, and how long until the part was at work again."""

    part: str
    step: int
    up_after_s: float = 0.0


@dataclass
class Watched:
    """What is seen of a run from outside. `orphan_adapters` were on an engine although no version of that name was."""

    folder: Path
    mark: str
    process: subprocess.Popen[bytes]
    kills: list[Kill] = field(default_factory=list)
    had_current: list[bool] = field(default_factory=list)
    engines: dict[int, float] = field(default_factory=dict)
    orphan_adapters: set[str] = field(default_factory=set)

    @property
    def run(self) -> Path:
        """The run's folder; one that is not there yet has another name."""
        return next((self.folder / "runs").glob("kills-*"), self.folder / "runs" / "none")

    def about(self) -> dict[str, Any]:
        """The parts in run.json."""
        try:
            found: dict[str, Any] = json.loads((self.run / "run.json").read_text())["parts"]
        except (OSError, KeyError):
            return {}
        return found

    def step(self) -> int:
        """The newest step that was recorded."""
        return max((int(line["step"]) for line in read_metrics(self.run / "metrics.jsonl")), default=0)

    def events(self) -> list[dict[str, Any]]:
        """The launcher's record."""
        path = self.run / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def at_work(self) -> bool:
        """Whether all four parts were started and, where they have a port, were ready."""
        last: dict[str, str] = {}
        for event in self.events():
            if event["event"] in ("started", "ready", "died"):
                last[event["part"]] = event["event"]
        wanted = {"engine": "ready", "gateway": "ready", "runner": "started", "trainer": "started"}
        return all(last.get(part) == state for part, state in wanted.items())

    def until(self, what: str, true: Callable[[], bool], every_s: float = 0.25) -> None:
        """Wait. Raises RuntimeError when the launcher ends first, or after `UP_WITHIN_S` s."""
        deadline_s = time.monotonic() + UP_WITHIN_S
        while not true():
            if self.process.poll() is not None:
                raise RuntimeError(f"launch.py ended with {self.process.returncode} while waiting until {what}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {UP_WITHIN_S:.0f} s in vain until {what}")
            time.sleep(every_s)

    def look_at_adapters(self) -> None:
        """Names of versions on the engine that are not live, seen several times over (one look is no moment)."""
        parts = self.about()
        key = (self.run / "store" / "admin.key").read_text().strip()
        extra: set[str] = set()
        for _ in range(20):
            try:
                with GatewayClient(f"http://127.0.0.1:{parts['gateway']['port']}", key, timeout_s=30) as client:
                    live = {one.name for policy in client.status().policies for one in policy.live}
                url = f"http://127.0.0.1:{parts['engine']['port']}/v1/models"
                there = {one["id"] for one in httpx.get(url, trust_env=False).json()["data"] if one.get("parent")}
            except (GatewayError, httpx.HTTPError):
                return  # one of them is away
            extra = there - live
            if not extra:
                return
            time.sleep(1.0)
        self.orphan_adapters |= extra


def make_tasks(folder: Path) -> None:
    """Four tasks of one short question each."""
    for word in ("river", "stone", "cloud", "lamp"):
        task = folder / word
        (task / "tests").mkdir(parents=True)
        (task / "task.toml").write_text(
            'version = "1.0"\n\n[metadata.turngate]\nprompts = ["instruction.md", "followup.md"]\n'
            "reward_range = [0.0, 1.0]\n\n[agent]\ntimeout_sec = 300.0\n\n[verifier]\ntimeout_sec = 60.0\n"
        )
        (task / "instruction.md").write_text(f"What is a {word}?\n")
        (task / "followup.md").write_text("Say it again.\n")
        (task / "tests" / "test.sh").write_text(VERIFIER)


def config(folder: Path, steps: int, kills: int) -> dict[str, Any]:
    """The launch file."""
    return {
        "name": "kills",
        "model": str(folder / "model"),
        "out": str(folder / "runs"),
        "engine": {
            "dtype": "float32",
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "max_loras": 6,
            "max_lora_rank": 8,
            "extra_args": ["--block-size", "32", "--enforce-eager"],
            "env": {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        },
        "gateway": {"start_timeout_s": 600.0},
        "run": {
            "tasks": str(folder / "tasks"),
            "harness": "pi",
            "harness_options": {"tools": False, "system_prompt": "Answer.", "max_answer_tokens": 12},
            "scratch": str(folder / "scratch"),
            "concurrency": 3,
            "group_size": 3,
            "max_ready_groups": 2,
            "deadline_s": 300,
            "sampling": {"temperature": 1.0, "max_tokens": 12},
        },
        "train": {
            "steps": steps,
            "groups_per_step": 1,
            "token_budget": 4096,
            "learning_rate": 1.0e-3,
            "threads": 1,
            "lora_r": 4,
            "lora_targets": ["q_proj", "v_proj"],
            "device": "cpu",
            "max_staleness": 8,
        },
        # Kills come close together here, and that is no sign of a part that cannot live.
        "restarts": {"limit": 2 * kills, "at_once": kills + 1, "pause_s": 0.5},
    }


def plan(kills: int, steps: int, parts: Sequence[str], chance: random.Random) -> Iterator[tuple[int, str]]:
    """(step after which, part) of each kill: in rounds of all parts in random order; two steps are left."""
    order: list[str] = []
    for number in range(kills):
        if not order:
            order = chance.sample(parts, len(parts))
        yield 1 + number * (steps - 3) // kills, order.pop()


def kill(watched: Watched, part: str) -> None:
    """SIGKILL to a part; returns when it and all others are at work again."""
    before = watched.about()[part]
    made = Kill(part, watched.step())
    began = time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    print(f"killed {part} (pid {before['pid']}) after step {made.step}", file=sys.stderr, flush=True)
    watched.until(f"the {part} is started again", lambda: watched.about()[part]["pid"] != before["pid"])
    watched.until(f"the {part} is at work again", watched.at_work)
    made.up_after_s = round(time.monotonic() - began, 1)
    watched.kills.append(made)
    if part == "engine":
        watched.engines[watched.about()["engine"]["pid"]] = time.time()
        watched.had_current.append(_has_current(watched))
    watched.look_at_adapters()


def _has_current(watched: Watched) -> bool:
    """Whether the restarted engine gets the version that is routed to."""
    parts = watched.about()
    key = (watched.run / "store" / "admin.key").read_text().strip()
    for _ in range(120):
        try:
            with GatewayClient(f"http://127.0.0.1:{parts['gateway']['port']}", key, timeout_s=30) as client:
                policy = client.status().policies[0]
            url = f"http://127.0.0.1:{parts['engine']['port']}/v1/models"
            there = {one["id"] for one in httpx.get(url, trust_env=False, timeout=30).json()["data"]}
            if policy.version and any(one.version == policy.version and one.name in there for one in policy.live):
                return True
        except (GatewayError, httpx.HTTPError):
            pass
        time.sleep(0.5)
    return False


def wait_for_a_moment(watched: Watched, part: str, chance: random.Random) -> None:
    """A random one; for the trainer, mostly while it publishes a version and writes its checkpoint."""
    if part != "trainer" or chance.random() < 1 / 3:
        time.sleep(chance.uniform(0.0, LONGEST_WAIT_S))
        watched.until("all parts are at work", watched.at_work)
        return
    before = set((watched.run / "adapters").glob("step-*"))
    watched.until(
        "the trainer writes an adapter", lambda: bool(set((watched.run / "adapters").glob("step-*")) - before), 0.02
    )
    time.sleep(chance.uniform(0.0, 1.5))


def drive(folder: Path, kills: int, steps: int, parts: Sequence[str], seed: int) -> Watched:
    """The whole run with its kills. Raises RuntimeError when it stands still or ends early."""
    mark, chance = uuid.uuid4().hex, random.Random(seed)
    file = folder / "kills.yaml"
    file.write_text(yaml.safe_dump(config(folder, steps, kills)))
    with (folder / "launch.out").open("wb") as out, (folder / "launch.err").open("wb") as err:
        command = [sys.executable, str(ROOT / "launch.py"), str(file)]
        process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, MARK: mark}, cwd=folder)
    watched = Watched(folder, mark, process)
    try:
        watched.until("all parts are at work", watched.at_work)
        for step, part in plan(kills, steps, parts, chance):
            watched.until(f"step {step} is made", lambda step=step: watched.step() >= step and watched.at_work())
            wait_for_a_moment(watched, part, chance)
            kill(watched, part)
        process.wait(timeout=UP_WITHIN_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=120)
    return watched


def processes(mark: str) -> list[str]:
    """What still runs of the run: command lines of processes with its mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue
    return found


def adapter_turns_after(run: Path, since_s: float) -> int:
    """Turns sampled with an adapter after `since_s`."""
    found = 0
    with StoreReader(run) as reader:
        for record in reader.rollouts():
            for turn in reader.turns(record.id):
                found += turn.timings.received_at_ns > since_s * 1e9 and any(span.version for span in turn.spans)
    return found


def report(watched: Watched, steps: int) -> dict[str, Any]:
    """The figures of a run that has ended."""
    run, folder = watched.run, watched.folder
    tool = [sys.executable, "-m", "turngate.proxy.cli"]
    told = subprocess.run([*tool, "lineage", str(run), "--json"], capture_output=True, text=True, check=False).stdout
    lines = (folder / "launch.out").read_text().splitlines()
    summary = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    with ControlStore(run / "store" / "control.sqlite", readonly=True) as control:
        left = control.summary()
    up: dict[str, list[float]] = defaultdict(list)
    for made in watched.kills:
        up[made.part].append(made.up_after_s)
    scratch = folder / "scratch"
    made_steps = [line["step"] for line in read_metrics(run / "metrics.jsonl")]
    return {
        "status": watched.process.returncode,
        "kills": len(watched.kills),
        "killed": dict(Counter(made.part for made in watched.kills)),
        "restarts": summary.get("restarts"),
        "up_again_s": {part: round(statistics.median(times), 1) for part, times in up.items()},
        "steps_planned": steps,
        "steps": summary.get("steps"),
        "steps_redone": len(made_steps) - len(set(made_steps)),
        "groups_returned": sum(map(int, _RETURNED.findall((run / "logs" / "trainer.log").read_text()))),
        "adapter_versions": summary.get("adapter_versions"),
        "lineage": json.loads(told.splitlines()[0]) if told else None,
        **{name: summary.get(name) for name in ("rollouts", "turns", "breaks", "rows", "exact_rows")},
        "unscorable": left.unscorable,
        "had_current": sum(watched.had_current),
        "engine_restarts": len(watched.had_current),
        "turns_after": adapter_turns_after(run, max(watched.engines.values())) if watched.engines else 0,
        "alarms": [event["text"] for event in watched.events() if event["event"] == "alarm"],
        "orphans": {
            "processes": processes(watched.mark),
            "sandboxes": [path.name for path in scratch.iterdir()] if scratch.exists() else [],
            "open_rollouts": left.open_rollouts,
            "leased_groups": left.groups["leased"],
            "adapters": sorted(watched.orphan_adapters),
        },
        "made": [[made.part, made.step, made.up_after_s] for made in watched.kills],
    }


def sound(found: dict[str, Any], kills: int) -> bool:
    """Whether nothing was lost, nothing done twice and nothing left."""
    return bool(
        found["status"] == 0
        and found["kills"] == kills
        and found["steps"] == found["steps_planned"]
        and found["lineage"]["ok"]
        and found["exact_rows"] == found["rows"] > 0
        and found["had_current"] == found["engine_restarts"]
        and not any(found["orphans"].values())
    )


def main() -> int:
    """Make model and tasks, run, report."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a small model's tokenizer")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--steps", type=int, default=26, help="optimizer steps; at least the kills and three more")
    parser.add_argument("--parts", default=",".join(PARTS), help="which are killed (all four)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the moments of the kills")
    parser.add_argument("--keep", type=Path, help="folder to work in and to leave; default: a temporary one")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny(options.tokenizer, folder / "model", folder / "adapter")
    make_tasks(folder / "tasks")
    began = time.monotonic()
    try:
        watched = drive(folder, options.kills, options.steps, options.parts.split(","), options.seed)
        found = report(watched, options.steps)
    except RuntimeError as error:
        print(f"{error}\n{(folder / 'launch.out').read_text()[-3000:]}", file=sys.stderr)
        print((folder / "launch.err").read_text()[-3000:], file=sys.stderr)
        return 1
    found["seconds"] = round(time.monotonic() - began)
    if options.keep is None:
        shutil.rmtree(folder)
    print(json.dumps(found))
    return 0 if sound(found, options.kills) else 1


if __name__ == "__main__":
    sys.exit(main())
