"""Held-out solve rates of a base and of adapters, one after the other through a gateway of its own: one JSON object.

python bench/gpu/heldout.py WORK --engine URL --run examples/two.yaml --adapter start=FOLDER --adapter async=FOLDER

The first adapter is what training began from, all later ones are compared with it and with the base, paired by task
(bootstrap over tasks). Each is published as a version of one policy and judged by `turngate eval` with fixed seeds.
What was evaluated before an end by --limit-s is printed; called again with the same WORK it goes on with the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from turngate.proxy import wire
from turngate.proxy.client import GatewayClient
from turngate.trainer import eval_log
from turngate.trainer.engine_process import healthy, own_port

CLI = [sys.executable, "-m", "turngate.proxy.cli"]
SETS = ("dataops:heldout-parameters", "dataops:heldout-templates")
STEPS_APART = 1_000_000
"""Evaluations are told apart by the step of what they judge: the second adapter's is this, the third's twice this."""
KEPT = ("rate", "ci", "by_set", "reward_mean", "attempts", "turns_mean", "tokens_mean", "tool_calls_per_solved")
MORE = ("truncated_share", "empty_share", "causes", "seconds", "versus_base", "versus_start")


@contextlib.contextmanager
def gateway(work: Path, engine: str) -> Iterator[tuple[str, Path]]:
    """A gateway process with its store in `work`: its URL and its administration key's file."""
    store, port = work / "store", own_port(0, "gateway")
    with (work / "gateway.log").open("ab") as log:
        argv = [*CLI, "proxy", "--engine", engine, "--store", str(store), "--port", str(port)]
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while not healthy(f"{url}/readyz", timeout_s=2.0):
            if process.poll() is not None:
                raise SystemExit(f"the gateway ended: {work / 'gateway.log'}")
            time.sleep(0.2)
        yield url, store / "admin.key"
    finally:
        process.terminate()
        process.wait()


def eval_settings(args: argparse.Namespace, url: str, key: Path) -> dict[str, Any]:
    """The file of `turngate eval`: agents run as in the launch file, on other tasks."""
    run = yaml.safe_load(args.run.read_text())["run"]
    run = {name: value for name, value in run.items() if name not in ("tasks", "max_ready_groups")}
    run |= {"gateway": url, "admin_key_file": str(key), "policy": "policy", "sandbox": args.sandbox}
    asked = {"tasks": args.tasks, "attempts": args.attempts, "concurrency": args.concurrency, "base": True}
    return {"output": str(args.work), "eval": asked, "run": run, "report_to": []}


def evaluated(work: Path, names: Sequence[str]) -> dict[str, Any]:
    """What there is, by the adapters' names."""
    called = {"base": "base", "start": names[0]} | {
        f"step-{at * STEPS_APART}": name for at, name in enumerate(names) if at
    }
    return {
        called[one["name"]]: {key: one[key] for key in (*KEPT, *MORE) if key in one}
        for one in eval_log.read(work)
        if one["name"] in called
    }


def remembered(work: Path, names: Sequence[str]) -> list[str]:
    """Names in the order of their steps: what an earlier call with `work` judged keeps its place, the rest follows."""
    file = work / "adapters.json"
    known: list[str] = json.loads(file.read_text()) if file.exists() else []
    if known and known[0] != names[0]:
        raise SystemExit(f"{work} compares with {known[0]}, not with {names[0]}: give it first, or another folder")
    known += [name for name in names if name not in known]
    file.write_text(json.dumps(known))
    return known


def main() -> int:
    """Print the object."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--run", type=Path, required=True, help="a launch file: how agents are run")
    parser.add_argument("--adapter", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--tasks", nargs="+", default=list(SETS))
    parser.add_argument("--attempts", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--limit-s", type=float, default=600.0)
    args = parser.parse_args()
    adapters = [(name, Path(folder).resolve()) for name, _, folder in (one.partition("=") for one in args.adapter)]
    end_s = time.monotonic() + args.limit_s
    args.work.mkdir(parents=True, exist_ok=True)
    names = remembered(args.work, [name for name, _ in adapters])
    with gateway(args.work, args.engine) as (url, key), GatewayClient(url, key.read_text().strip()) as client:
        file = args.work / "eval.yaml"
        file.write_text(yaml.safe_dump(eval_settings(args, url, key), sort_keys=False))
        for name, folder in sorted(adapters, key=lambda one: names.index(one[0])):
            if name in evaluated(args.work, names):
                continue
            at = names.index(name)
            client.publish_adapter(wire.PublishAdapter(policy="policy", path=str(folder), step=at * STEPS_APART))
            try:
                with (args.work / "eval.log").open("ab") as log:
                    subprocess.run(
                        [*CLI, "eval", "--config", str(file), "--once"],
                        stdout=log,
                        stderr=log,
                        timeout=max(1.0, end_s - time.monotonic()),
                        check=True,
                    )
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                print(f"{name}: {error}", file=sys.stderr)
                break
    print(json.dumps(evaluated(args.work, names), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
