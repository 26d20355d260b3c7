"""Stands for engine, gateway, runner, trainer and verify in tests of the launcher: quick, and as naughty as asked.

`FAKE_<PART>` in the environment says how it misbehaves: `die` (says why, ends with 3), `deaf` (ignores SIGTERM),
`children` (leaves a grandchild in a session of its own), `unpublished` (step 2's weights do not go live), `unlearnt` (a
token that fine-tuning did not bring near).
A trainer that is started again goes on after its last step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

STATUS = {
    "run": "fake",
    "open_rollouts": 2,
    "finished_rollouts": 12,
    "scored_rollouts": 12,
    "unscorable": {},
    "turns": 24,
    "spliced": 12,
    "breaks": {},
    "generated_tokens": 480,
    "groups": {"trained": 3},
    "reward_mean_last": 0.5,
    "policies": [{"policy": "policy", "base_model": "fake", "version": 1, "live": []}],
}
LINEAGE = {"ok": True, "scheduled": 5, "trained": 3, "zero_variance": 1, "dropped": 1, "problems": []}
REPORT = {
    "ok": True,
    "rollouts": 12,
    "turns": 24,
    "spliced": 12,
    "breaks": {},
    "rows": 12,
    "exact_rows": 12,
    "sampled_tokens": 480,
    "trained_tokens": 480,
}


class Handler(BaseHTTPRequestHandler):
    """200 to everything; `/status` in full."""

    def do_GET(self) -> None:
        self.answer(STATUS if self.path == "/status" else [] if self.path.startswith("/rollouts") else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer({"dropped_groups": 1})

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def serve() -> None:
    ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()


def train() -> None:
    settings = yaml.safe_load(Path(option("--config")).read_text())
    metrics = Path(settings["output"]) / "metrics.jsonl"
    done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    for step in range(done + 1, settings["steps"] + 1):
        time.sleep(float(os.environ.get("FAKE_STEP_S", "0.05")))
        record = {"step": step, "groups": 1, "tokens": 100, "reward_mean": step / 10, "version": step + 1}
        if step == 2 and "unpublished" in os.environ.get("FAKE_TRAIN", ""):
            record |= {"settled": {"publication failed": 1}, "held_version": 2}
        with metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
    if settings.get("await_evaluation_s"):
        evals = metrics.parent / "evals"
        (evals / "trained").touch()
        while not (evals / "over").exists():
            time.sleep(0.02)
        print(f"{len((metrics.parent / 'evals.jsonl').read_text().splitlines())} evaluations told", flush=True)


def evaluate() -> None:
    output = Path(yaml.safe_load(Path(option("--config")).read_text())["output"])
    (output / "evals").mkdir(exist_ok=True)
    while not (output / "evals" / "finish").exists():
        time.sleep(0.02)
    nothing = {"name": "step-3", "rate": None, "causes": {}, "alarms": []}
    (output / "evals.jsonl").write_text(json.dumps(nothing) + "\n")


def learn() -> None:
    settings = yaml.safe_load(Path(option("--config")).read_text())
    output = Path(settings["output"])
    (output / "adapter").mkdir(parents=True)
    unlearnt = "unlearnt" in os.environ.get("FAKE_SFT", "")
    if unlearnt:
        (output / "sft.json").write_text(json.dumps({"alarms": ["untrained tokens: none can be taught"]}))
        time.sleep(1.0)
    told = {"rows": 8, "tasks": 4, "steps": 3, "loss_first": 2.966, "loss_last": 0.5434}
    told |= {"hardest": [{"token": "<tool_call>", "loss_last": 9.133}]}
    told["alarms"] = (
        ["untrained tokens: none can be taught", "fine-tuning: it will hardly ever call"] if unlearnt else []
    )
    (output / "sft.json").write_text(json.dumps(told))


def main() -> None:
    part = sys.argv[1]
    if part in ("verify", "lineage"):
        print(json.dumps(REPORT if part == "verify" else LINEAGE))
        return
    mood = os.environ.get(f"FAKE_{part.upper()}", "")
    if "children" in mood:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if "deaf" in mood:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "die" in mood:
        print(f"the {part} broke its leg", flush=True)
        sys.exit(3)
    if part == "proxy":
        key = Path(option("--admin-key-file"))
        key.write_text("key\n")
    if part in ("proxy", "engine"):
        serve()
    elif part == "train":
        train()
    elif part == "sft":
        learn()
    elif part == "eval":
        evaluate()
    elif part == "run" and "demonstrations" in option("--config"):
        print("8 rollouts, all scored")
    elif "done" not in mood:
        time.sleep(1000)


if __name__ == "__main__":
    main()
