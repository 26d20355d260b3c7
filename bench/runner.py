#!/usr/bin/env python3
"""Many real agents at once through runner and sandboxes, for minutes: what is left, and how fast a sandbox is ready.

    python bench/runner.py                                  # 32 pi at once for 2 minutes, then starts of each sandbox
    python bench/runner.py --minutes 10 --out result.json
    python bench/runner.py --starts 40 --minutes 0          # only the starts

The engine is the tests' fake one, so the machine's cores go to agents and runner. The last line is one JSON object:
counts of processes, descriptors, threads, mounts, cgroups, folders and open sessions before and after (`sandboxes` has
those of the whole machine whose parent is gone), and the time from asking for a sandbox to the first instruction of its
job, median and 95th percentile, by kind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.conftest import find_model
from tests.fake_engine.runner import FakeEngine
from tests.fake_engine.settings import FakeSettings
from tests.gateway_process import GatewayProcess
from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.cgroups import Cgroups
from turngate.harnesses.install import install
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.pi import Pi
from turngate.harnesses.process import PlainProcess
from turngate.harnesses.rollout import Stage
from turngate.harnesses.run import make_plan
from turngate.harnesses.runner import Runner
from turngate.harnesses.sandbox import Ground, Job, Limits, Mount, Sandbox
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.tasks.harbor import load_task

AGENTS = 32
TASK = {
    "task.toml": 'version = "1.0"\n',
    "instruction.md": "Count the lines of data.txt and write the number to out.txt.\n",
    "environment/data.txt": "a\nb\nc\n",
    "tests/test.sh": 'grep -qx 3 out.txt && reward=1 || reward=0; echo $reward >"$TURNGATE_REWARDS/reward.txt"\n',
}
CALL = {"name": "bash", "arguments": {"command": "sleep 0.2; wc -l <data.txt >out.txt"}}
SCRIPT = [{"content": "", "tool_calls": [CALL]}, "It has three lines."]


def counts(gateway: GatewayProcess, scratch: Path) -> dict[str, int]:
    """What this run holds now: of its own process, the gateway's, and the machine's."""
    me = psutil.Process()
    assert gateway.process is not None
    theirs = psutil.Process(gateway.process.pid)
    ours = {process.pid for process in me.children(recursive=True)}
    return {
        "runner_descriptors": me.num_fds(),
        "runner_threads": me.num_threads(),
        "runner_children": len(me.children(recursive=True)) - 1 - len(theirs.children(recursive=True)),
        "gateway_descriptors": theirs.num_fds(),
        "sandboxes": sum(
            process.info["name"] == "bwrap" and (process.info["ppid"] == 1 or process.info["pid"] in ours)
            for process in psutil.process_iter(["name", "ppid", "pid"])
        ),
        "mounts": Path("/proc/self/mountinfo").read_text().count(str(scratch)),
        "cgroups": sum(1 for parent in CGROUPS.folders for entry in parent.iterdir() if entry.is_dir()),
        "rollout_folders": sum(1 for _ in scratch.glob("turngate-run-*/0*")),
        "open_sessions": gateway.client.status().open_rollouts,
    }


CGROUPS = Cgroups.none()


async def load(minutes: float, agents: int, folder: Path) -> dict[str, Any]:
    """`agents` real pi at once for `minutes`: counts before, in the middle and after, and what came of the rollouts."""
    global CGROUPS
    for name, text in TASK.items():
        path = folder / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    model = find_model("qwen-coder-0.5b")
    with ExitStack() as stack:
        settings = FakeSettings(tokens_per_s=100.0, keep_requests=0)
        engine = stack.enter_context(FakeEngine(model, script=SCRIPT, settings=settings))
        gateway = stack.enter_context(
            GatewayProcess(engine.url, folder / "store", "--tokenizer", str(model), "--log-level", "warning")
        )
        scratch = stack.enter_context(Scratch(folder / "scratch"))
        CGROUPS = Cgroups.find()
        stack.callback(CGROUPS.close)
        wanted = RunSettings(
            gateway=gateway.url, concurrency=agents, group_size=4, extra_rollouts=1, deadline_s=300.0, retries=1
        )
        patient = PatientGateway(gateway.client, 30.0)
        stage = Stage(wanted, Pi(), install(Pi()), Bubblewrap(CGROUPS), patient, scratch, run="bench")
        await Runner(stage, make_plan(wanted.model_copy(update={"groups": 1}), [load_task(folder / "task")])).run()
        before = counts(gateway, folder / "scratch")
        runner = Runner(stage, make_plan(wanted, [load_task(folder / "task")]))
        running = asyncio.create_task(runner.run())
        began, middle, most = time.monotonic(), {}, 0
        while time.monotonic() - began < 60 * minutes and not running.done():
            await asyncio.sleep(1.0)
            most = max(most, runner.in_flight)
            if not middle and time.monotonic() - began > 30 * minutes:
                middle = await asyncio.to_thread(counts, gateway, folder / "scratch")
        runner.stop()
        results = await running
        spent_s = time.monotonic() - began
        await asyncio.sleep(2.0)
        after = counts(gateway, folder / "scratch")
    causes = Counter(result.cause or "scored" for result in results)
    return {
        "agents": agents,
        "minutes": round(spent_s / 60, 2),
        "most_in_flight": most,
        "rollouts": len(results),
        "rollouts_per_minute": round(60 * len(results) / spent_s, 1),
        "ended": dict(causes),
        "solved": sum(result.reward == 1.0 for result in results),
        "before": before,
        "middle": middle,
        "after": after,
        "leaked": {name: after[name] - before[name] for name in before if after[name] > before[name]},
    }


async def starts(box: Sandbox, ground: Ground, number: int, folder: Path) -> dict[str, float]:
    """How long it takes from asking for a sandbox to the first instruction of its job, one at a time."""
    taken_ms = []
    work = PurePosixPath("/workspace")
    for index in range(number + 1):
        workspace = folder / f"{box.name}{index}"
        workspace.mkdir()
        places = box.places(None, workspace, workspace, work)
        argv = ["bash", "-c", "echo $EPOCHREALTIME"]
        mounts = [Mount(workspace, work, writable=True)]
        job = Job(argv, {}, mounts, PurePosixPath("/tmp"), places.workspace, 60.0, image=ground.image)
        asked_s = time.time()
        done = await box.run(job)
        taken_ms.append((float(done.stdout.replace(",", ".")) - asked_s) * 1e3)
    ordered = sorted(taken_ms[1:])
    return {
        "starts": number,
        "first_ms": round(taken_ms[0], 1),
        "median_ms": round(statistics.median(ordered), 1),
        "p95_ms": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1),
    }


@contextmanager
def boxes(folder: Path) -> Iterator[list[tuple[Sandbox, Ground]]]:
    """Every kind of sandbox that this machine can make, with the limits it can hold."""
    with ExitStack() as stack:
        cgroups = Cgroups.find()
        stack.callback(cgroups.close)
        found: list[tuple[Sandbox, Ground]] = [(Bubblewrap(cgroups), Ground()), (PlainProcess(cgroups), Ground())]
        if os.geteuid() == 0:
            import docker

            from tests.dockerd import BASE, make_base, own_daemon
            from turngate.harnesses.container import Docker

            address = stack.enter_context(own_daemon())
            client = docker.DockerClient(base_url=address)
            make_base(client)
            client.close()
            box = Docker(folder / "docker", host=address)
            stack.callback(box.close)
            found.append((box, Ground(None, BASE)))
        yield found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="how long the agents run; 0 leaves them out")
    parser.add_argument("--agents", type=int, default=AGENTS, help="agents at once")
    parser.add_argument("--starts", type=int, default=40, help="sandboxes started one after another; 0 leaves them out")
    parser.add_argument("--out", type=Path, help="also write the result here")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load_average_before": round(os.getloadavg()[0], 1),
        "limits": Limits().model_dump(),
    }
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as name:
        folder = Path(name)
        if options.starts:
            with boxes(folder) as found:
                result["ready"] = {
                    box.name: asyncio.run(starts(box, ground, options.starts, folder)) for box, ground in found
                }
        if options.minutes:
            result["load"] = asyncio.run(load(options.minutes, options.agents, folder))
    result["load_average_after"] = round(os.getloadavg()[0], 1)
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
