"""`turngate eval`: follows a policy and evaluates it on held-out tasks: base, start, every so many steps, the end.

A process of its own beside runner and trainer, so that neither waits for it. It pins the version it evaluates, keeps
the best adapter in `best/`, and says what rings an alarm; it must never train on what it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turngate.harnesses.errors import HarnessesError
from turngate.harnesses.evaluation import Attempt, attempt_all, load_sets
from turngate.harnesses.runner import Runner
from turngate.harnesses.setting_errors import apply_override, explain
from turngate.harnesses.setting_files import read_mapping
from turngate.harnesses.settings import RunSettings
from turngate.proxy import wire
from turngate.proxy.arguments import Parser
from turngate.proxy.client import GatewayClient, GatewayError
from turngate.tasks.errors import TasksError
from turngate.tasks.harbor import Task
from turngate.trainer import eval_log
from turngate.trainer.alarms import alarms
from turngate.trainer.errors import SettingsError
from turngate.trainer.eval_settings import EvalSettings
from turngate.trainer.eval_stats import figures, paired_difference
from turngate.trainer.files import output_folder, write_json
from turngate.trainer.progress import read_metrics
from turngate.trainer.settings import REPORT_TO
from turngate.trainer.tracking import BASE, EMBEDDED, EVALUATION, Tracker, Tracking, numbers

log = logging.getLogger("turngate.eval")

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
LOOK_EVERY_S = 1.0
HOLDER = "evaluator"
"""What the sessions that hold a version name as their harness."""

FINISH = "finish"
"""A file of this name in `OUTPUT/evals`: the training is over, evaluate what it ended with and leave."""

EPILOG = """\
examples:
  turngate eval --config runs/try/evaluator.yaml             follow the run until it ends
  turngate eval --config eval.yaml --once                    the base and the current version, then leave
  turngate eval --config eval.yaml --once eval.attempts=8 run.concurrency=64

The file has `output`, and the sections `eval` and `run` of a launch file. Results: OUTPUT/evals.jsonl, OUTPUT/best.
exit status: 0 ok, 1 failed, 2 wrong usage, 130 interrupted (started again it goes on)
"""


class EvaluatorSettings(BaseModel):
    """What `turngate eval` is told; the launcher writes it as `evaluator.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    output: Path = Field(description="folder of the run: evals.jsonl, evals/ and best/ go there")
    eval: EvalSettings = Field(description="what is evaluated, and when")
    run: RunSettings = Field(description="how agents are run: the settings of `turngate run`")
    report_to: tuple[Tracker, ...] = Field(
        REPORT_TO, description="where to report besides: trackio, into the project of the training; empty: nowhere"
    )

    @property
    def policy(self) -> str:
        """The policy that is followed."""
        return self.run.policy or "policy"


class Evaluator:
    """Follows one policy; everything that it found before it was ended is read from `output` again."""

    def __init__(
        self, settings: EvaluatorSettings, client: GatewayClient, say: Callable[[str], None] = log.warning
    ) -> None:
        self.settings = settings
        self.client = client
        self.records = eval_log.read(settings.output)
        self.stopped = False
        self._curves = Tracking(
            settings.output, settings.eval.model_dump(mode="json"), wanted=EMBEDDED in settings.report_to
        )
        self._say = say
        self._runner: Runner | None = None
        self._start: tuple[wire.AdapterInfo, str] | None = None
        self._tasks, self._origin = self._load()

    def stop(self) -> None:
        """End the evaluation in progress; started again, it goes on."""
        self.stopped = True
        if self._runner is not None:
            self._runner.cancel()

    async def follow(self, *, once: bool = False) -> None:
        """Evaluate what is due, until the training is over; with `once` only what is due now."""
        finish = self.settings.output / "evals" / FINISH
        await self._settle_left_open()
        looking = asyncio.create_task(self._look_for_start())
        try:
            if self.settings.eval.base and not self._done("base"):
                await self._evaluate("base", 0, None)
            while not self.stopped:
                ending = once or finish.exists()
                try:
                    current = await asyncio.to_thread(self._current)
                    await self._hold_start(current)
                except GatewayError as error:
                    if error.status or once:
                        raise
                    current, ending = None, False  # it is being restarted
                due = self._due(current, ending)
                if due is None and ending:
                    return
                if due is None or not await self._evaluate(due[0], due[1].version, due[1]):
                    await asyncio.sleep(LOOK_EVERY_S)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await self._let_go_of_start()

    def _due(self, current: wire.AdapterInfo | None, ending: bool) -> tuple[str, wire.AdapterInfo] | None:
        """The evaluation to make now. The start is the base unless an adapter of step 0 was published."""
        step = current.step if current else 0
        if self._start is not None and not self._done("start"):
            return "start", self._start[0]
        if not self._done("start") and (step > 0 or ending) and self._done("base") and not self._began_warm():
            self._append({**self._named("base"), "name": "start"})
        last = max((record["step"] for record in self.records), default=0)
        wanted = ending or step >= last + self.settings.eval.every_steps
        return (f"step-{step}", current) if current is not None and step > last and wanted else None

    async def _look_for_start(self) -> None:
        """While the base is evaluated the training may begin: do not let the version it begins with go."""
        while self._start is None and not self._done("start"):
            with contextlib.suppress(GatewayError):
                await self._hold_start(await asyncio.to_thread(self._current))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _hold_start(self, current: wire.AdapterInfo | None) -> None:
        """Keep the adapter of step 0 loaded from when it is first seen until it is evaluated."""
        if self._start is None and current is not None and current.step == 0 and not self._done("start"):
            self._start = (current, "")
            try:
                holder = await asyncio.to_thread(self.client.create_rollout, self._request("start", current.version))
            except GatewayError:
                self._start = None
                raise
            self._start = (current, holder.id)

    async def _let_go_of_start(self) -> None:
        if self._start is not None and self._start[1]:
            await self._let_go(self._start[1])
        self._start = None

    async def _settle_left_open(self) -> None:
        """Sessions that an evaluator which was killed held: the start's is taken over, the others let go."""
        with contextlib.suppress(GatewayError):
            live = {one.version: one for one in (await asyncio.to_thread(self._policy)).live}
            for one in await asyncio.to_thread(self.client.open_rollouts):
                if one.harness != HOLDER or one.metadata.get("output") != str(self.settings.output):
                    continue
                if self._start is None and one.task == _task("start") and not self._done("start"):
                    self._start = (live[one.version], one.id) if one.version in live else None
                if self._start is None or self._start[1] != one.id:
                    await self._let_go(one.id)

    async def _let_go(self, holder: str) -> None:
        gone = wire.FinishRollout(outcome="cancelled", cause="evaluation_ended")
        try:
            await asyncio.to_thread(self.client.finish_rollout, holder, gone)
        except GatewayError as error:
            log.info("the session %s that held a version was not closed: %s", holder, error)

    def _began_warm(self) -> bool:
        """Whether an adapter of step 0 was ever published."""
        return any(one.step == 0 for one in self.client.adapters(self.settings.policy))

    async def _evaluate(self, name: str, version: int, adapter: wire.AdapterInfo | None) -> bool:
        """Make one evaluation and record it; False when the version was gone, or it was stopped."""
        began = time.time()
        try:
            holder = await asyncio.to_thread(self.client.create_rollout, self._request(name, version))
        except GatewayError as error:
            if error.status != 400:
                raise
            log.info("version %d is not live any more: %s", version, error)
            if name == "start":
                await self._let_go_of_start()
            return False
        try:
            attempts = await self._attempt(name, version)
            if self.stopped:
                return False
            record = self._record(name, version, adapter, attempts, time.time() - began)
            if adapter is not None:
                record["best"] = self._keep_if_best(record, Path(adapter.path))
            self._append(record)
            if name == "start":
                await self._let_go_of_start()
            return True
        finally:
            await self._let_go(holder.id)

    async def _attempt(self, name: str, version: int) -> list[Attempt]:
        asked, run = self.settings.eval, self.settings.run
        settings = run.model_copy(
            update={
                "version": version,
                "group_size": asked.attempts,
                "extra_rollouts": 0,
                "concurrency": asked.concurrency,
                "max_ready_groups": None,
                "sampling": {**run.sampling, **asked.sampling},
                "deadline_s": asked.deadline_s or run.deadline_s,
                "group_deadline_s": (asked.deadline_s or run.deadline_s) * (asked.attempts + 1),
                "out": self.settings.output / "evals" / f"{name}-v{version}",
            }
        )

        def begun(runner: Runner) -> None:
            self._runner = runner
            if self.stopped:
                runner.cancel()

        return await attempt_all(settings, self._tasks, self.client, on_runner=begun)

    def _record(
        self, name: str, version: int, adapter: wire.AdapterInfo | None, attempts: Sequence[Attempt], seconds: float
    ) -> dict[str, Any]:
        solved_at, asked = self.settings.run.solved_at, self.settings.eval
        found = figures(attempts, self._origin, solved_at)
        record: dict[str, Any] = {
            "name": name,
            "version": version,
            "step": adapter.step if adapter else 0,
            "adapter": adapter.path if adapter else None,
            "time": time.time(),
            "seconds": seconds,
            **found,
        }
        for other in ("base", "start"):
            if name != other and self._done(other):
                before = self._named(other)["rewards"]
                gap = paired_difference(before, found["rewards"], solved_at=solved_at, draws=asked.bootstrap_draws)
                record[f"versus_{other}"] = gap.as_json() if gap else None
        steps = read_metrics(self.settings.output / "metrics.jsonl")
        record["alarms"] = alarms([*self.records, record], steps, asked, solved_at)
        return record

    def _keep_if_best(self, record: dict[str, Any], adapter: Path) -> bool:
        """Copy the adapter to `best/` when no earlier version solved as much; it is still pinned, so it is there."""
        earlier = [one for one in self.records if one["version"] > 0]
        if record["rate"] is None or any(_worth(one) >= _worth(record) for one in earlier):
            return False
        best, draft = self.settings.output / "best", self.settings.output / ".best.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(adapter, draft)
        write_json(draft / "evaluation.json", {key: value for key, value in record.items() if key != "rewards"})
        shutil.rmtree(best, ignore_errors=True)
        draft.rename(best)
        return True

    def _append(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        eval_log.append(self.settings.output, record)
        self._draw(record)
        self._say(eval_log.sentence(record))
        for alarm in record["alarms"]:
            self._say(f"ALARM {alarm}")

    def _draw(self, record: dict[str, Any]) -> None:
        """The evaluation's numbers as a point of a curve, written before the next one begins."""
        name = BASE if record["name"] == "base" else EVALUATION
        self._curves.log(name, numbers(eval_log.eval_metrics(record), ""), record["step"])
        self._curves.close()

    def _request(self, name: str, version: int) -> wire.NewRollout:
        """A session without turns: it keeps the version loaded from the first attempt to the last."""
        return wire.NewRollout(
            task=_task(name),
            harness=HOLDER,
            policy=self.settings.policy,
            training=False,
            version=version,
            metadata={"output": str(self.settings.output)},
        )

    def _current(self) -> wire.AdapterInfo | None:
        info = self._policy()
        return next((one for one in info.live if one.version == info.version), None)

    def _policy(self) -> wire.PolicyInfo:
        return self.client.policy(self.settings.policy)

    def _load(self) -> tuple[list[Task], dict[str, str]]:
        return load_sets(self.settings.run, self.settings.eval.tasks)

    def _done(self, name: str) -> bool:
        return any(record["name"] == name for record in self.records)

    def _named(self, name: str) -> dict[str, Any]:
        return next(record for record in self.records if record["name"] == name)


def _task(name: str) -> str:
    return f"evaluation {name}"


def _worth(record: dict[str, Any]) -> tuple[float, float]:
    return (record["rate"] or 0.0, record["reward_mean"] or 0.0)


def eval_command(argv: Sequence[str]) -> int:
    """Run `turngate eval ARGV`; returns the exit status."""
    options = _parser().parse_intermixed_args(list(argv))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = read_settings(options.config, options.overrides)
        key = settings.run.admin_key()
        output_folder(settings.output, "output")
    except (ValueError, OSError, SettingsError) as error:
        print(f"turngate eval: {error}", file=sys.stderr)
        return USAGE
    try:
        with GatewayClient(settings.run.gateway, key) as client:
            evaluator = Evaluator(settings, client)
            asyncio.run(_run(evaluator, once=options.once))
    except (HarnessesError, TasksError, GatewayError) as error:
        print(f"turngate eval: {error}", file=sys.stderr)
        return FAILED
    if options.once:
        print(json.dumps(evaluator.records))
    return INTERRUPTED if evaluator.stopped else OK


def read_settings(config: Path, overrides: Sequence[str]) -> EvaluatorSettings:
    """Settings from a YAML file and `key=value` overrides. Raises ValueError, with a line for each wrong key."""
    values = read_mapping(config)
    for override in overrides:
        apply_override(values, override)
    try:
        settings = EvaluatorSettings.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error, EvaluatorSettings, file=config, overrides=overrides)) from None
    if not settings.eval.tasks:
        raise ValueError("eval.tasks is empty: name the held-out sets, for example dataops:heldout-templates")
    return settings


async def _run(evaluator: Evaluator, *, once: bool) -> None:
    with _signals(evaluator.stop):
        await evaluator.follow(once=once)


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate eval",
        description="Evaluate a policy on held-out tasks while it is trained: rates with 95 % intervals, paired with "
        "the base and the start; the best adapter is kept.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML with output, eval and run")
    parser.add_argument("--once", action="store_true", help="only what is due now; prints all evaluations as JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings over the file's")
    return parser
