"""The parts of a run in order: engine, gateway, runner and trainer up; watched; down again; the store checked.

Every part is a process of its own below the warden. One that dies is started again (`parts.py`) until that is no use:
then the run ends with its reason. The trainer's end with status 0 is the run's.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from turngate.harnesses.workspace import reap_scratch
from turngate.proxy import wire
from turngate.proxy.client import GatewayClient, GatewayError
from turngate.trainer import engine_process as engine
from turngate.trainer import eval_log
from turngate.trainer import summary as ending
from turngate.trainer.alarms import gradient_alarm, last_of_each, publication_alarm
from turngate.trainer.children import Child, ChildError, Children, tail
from turngate.trainer.drain import Drain
from turngate.trainer.evaluator import FINISH
from turngate.trainer.launch_config import (
    LaunchConfig,
    Places,
    evaluator_settings,
    runner_settings,
    trainer_settings,
)
from turngate.trainer.models import resolve_model
from turngate.trainer.parts import Part, Parts
from turngate.trainer.progress import Display, TokenRate, read_metrics, snapshot
from turngate.trainer.run_folder import RunFolder
from turngate.trainer.tracking import EMBEDDED, how_to_look
from turngate.trainer.warm_start import demonstration_settings, in_a_line, learnt, sft_settings

LOOK_EVERY_S = 2.0
TOLD_WITHIN_S = 120.0
"""How long the trainer may take to report the last evaluation and leave."""


class Job:
    """One run from start to summary. `run` may raise TrainerError or KeyboardInterrupt; no process outlives it."""

    def __init__(self, config: LaunchConfig, folder: RunFolder, display: Display) -> None:
        self._config = config
        self._folder = folder
        self._display = display
        self._gateway_url = ""
        self._engine_url = ""
        self._status: wire.Status | None = None
        self._told = len(eval_log.read(folder.path))
        self._told_steps = len(read_metrics(folder.metrics))
        self._told_learning = 0

    def run(self) -> int:
        """0 when the trainer made its steps, the store is sound and every group had its one end; 1 otherwise."""
        self._folder.update(id=self._folder.id, state="running", launcher_pid=os.getpid(), started_utc_s=time.time())
        self._display.say(f"model {self._config.model}")
        model = resolve_model(self._config.model)
        try:
            with Children(self._folder.logs) as children:
                self._run_parts(Parts(children, self._config.restarts, self._display.say, self._folder.event), model)
        finally:
            # What a runner left that was ended hard; its successor would have removed it.
            reap_scratch(self._config.run.scratch or Path(tempfile.gettempdir()))
        self._display.stop()
        return self._conclude()

    def _run_parts(self, parts: Parts, model: Path | str) -> None:
        try:
            self._start(parts, model)
            self._watch(parts)
            self._end_rollouts(parts)
        except KeyboardInterrupt:
            self._display.say("stopping (Ctrl-C again to kill at once)")
            self._stop(parts)
            raise
        self._stop(parts)

    def _start(self, parts: Parts, model: Path | str) -> None:
        config = self._config
        self._engine_url = self._running_engine(parts) if config.engine.url else self._start_engine(parts, model)
        self._start_gateway(parts, model)
        if self._folder.resumed:
            self._until_answered(parts, lambda: self._cancel_left_open("the run before"))
        places = Places(
            self._gateway_url, self._folder.admin_key, self._folder.path, model=str(model), engine_url=self._engine_url
        )
        for mark in (f"evals/{FINISH}", eval_log.TRAINED, eval_log.OVER):
            (self._folder.path / mark).unlink(missing_ok=True)
        if config.eval.tasks:
            self._spawn_with(parts, "evaluator", "eval", evaluator_settings(config, places))
        adapter = self._warm_up(parts, places)
        # However the run was begun, a trainer that is started again goes on from its own checkpoints.
        settings = trainer_settings(config, places, adapter)
        self._spawn_with(parts, "trainer", "train", settings, again=("--resume", "true"))
        if adapter is not None:
            self._await_first_version(parts)
        self._spawn_with(parts, "runner", "run", runner_settings(config, places))

    def _running_engine(self, parts: Parts) -> str:
        """The engine that is not ours, once it is up."""
        settings = self._config.engine
        assert settings.url is not None

        def tick(waited_s: float) -> None:
            parts.tick()
            if waited_s > 5:
                self._display.waiting(f"waiting for the engine at {settings.url}, {waited_s:.0f} s so far")

        engine.await_running(settings.url, settings.start_timeout_s, self._display.say, tick)
        return settings.url

    def _start_engine(self, parts: Parts, model: Path | str) -> str:
        settings = self._config.engine
        distribution, version = engine.engine_version()
        port = engine.own_port(settings.port, "engine")
        url = f"http://{engine.HOST}:{port}"
        argv = engine.engine_argv(settings, model, port, version)
        env = engine.engine_env(settings, model, distribution)
        health = f"{url}/health"
        self._bring_up(
            parts, Part("engine", argv, env, port=port, url=health, start_timeout_s=settings.start_timeout_s)
        )
        return url

    def _start_gateway(self, parts: Parts, model: Path | str) -> None:
        settings = self._config.gateway
        port = engine.own_port(settings.port, "gateway")
        self._gateway_url = f"http://{engine.HOST}:{port}"
        argv = [*ending.CLI, "proxy", "--engine", self._engine_url, "--store", str(self._folder.store)]
        argv += ["--host", engine.HOST, "--port", str(port), "--policy", settings.policy]
        argv += ["--run", self._folder.id, "--durability", settings.durability, "--tokenizer", str(model)]
        argv += ["--admin-key-file", str(self._folder.admin_key), *settings.extra_args]
        ready = f"{self._gateway_url}/readyz"
        self._bring_up(parts, Part("gateway", argv, port=port, url=ready, start_timeout_s=settings.start_timeout_s))

    def _bring_up(self, parts: Parts, part: Part) -> None:
        """Start a server and wait until it is ready. Raises ChildError."""

        def tick(waited_s: float) -> None:
            if waited_s > 5:
                self._display.waiting(f"{part.name} is starting, {waited_s:.0f} s so far")

        self._spawn(parts, part)
        parts.await_ready(part.name, tick)

    def _spawn_with(
        self, parts: Parts, name: str, command: str, settings: BaseModel, *, again: Sequence[str] = ()
    ) -> Child:
        """Start `turngate COMMAND` with these settings, which are kept in the run's folder."""
        path = self._folder.path / f"{name}.yaml"
        values = settings.model_dump(mode="json", exclude_none=True)
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return self._spawn(parts, Part(name, [*ending.CLI, command, "--config", str(path)], again=again))

    def _spawn(self, parts: Parts, part: Part) -> Child:
        child = parts.start(part)
        self._folder.update(parts=parts.about())
        return child

    def _warm_up(self, parts: Parts, places: Places) -> Path | None:
        """The adapter that training begins from, made now unless it is there; None without `warm_start`."""
        wanted, out = self._config.warm_start, self._folder.path / "warm_start"
        if wanted is None or wanted.adapter is not None:
            return None if wanted is None or wanted.adapter is None else wanted.adapter.absolute()
        if (out / "adapter").is_dir():
            return out / "adapter"
        if wanted.demonstrations is not None:
            run = runner_settings(self._config, places)
            settings = demonstration_settings(run, wanted.demonstrations, self._folder.path / "demonstrations")
            self._spawn_with(parts, "demonstrations", "run", settings)
            self._through(parts, "demonstrations")
        train = trainer_settings(self._config, places, None)
        self._spawn_with(parts, "sft", "sft", sft_settings(train, wanted, places.store, out))
        self._through(parts, "sft", lambda: self._tell_fine_tuning(out))
        return out / "adapter"

    def _tick(self, parts: Parts) -> None:
        """What every wait does: deaths and restarts, evaluations, alarms."""
        before = parts.about()
        parts.tick()
        if (now := parts.about()) != before:
            self._folder.update(parts=now)
        self._tell_evaluations()

    def _through(self, parts: Parts, name: str, look: Callable[[], str] = lambda: "") -> None:
        """Wait until a stage has ended well, looking after it; say what `look` makes of it, or its last line."""
        began_s = time.monotonic()
        while not parts.done(name):
            self._tick(parts)
            look()
            self._display.waiting(f"{name} is at work, {time.monotonic() - began_s:.0f} s so far")
            time.sleep(0.2)
        last = look() or tail(self._folder.logs / f"{name}.log", 1).strip()
        self._display.say(f"{name} done after {time.monotonic() - began_s:.0f} s: {last}")

    def _await_first_version(self, parts: Parts) -> None:
        """Agents begin when the adapter is routed to: what the base does is not what is to be trained."""
        with self._client(timeout_s=10.0) as client:
            while not parts.done("trainer"):
                self._tick(parts)
                status = self._look(client)
                if status is not None and any(policy.version > 0 for policy in status.policies):
                    return
                self._display.waiting("the trainer is starting and publishes the adapter to begin with")
                time.sleep(0.5)

    def _cancel_left_open(self, whose: str) -> None:
        """Rollouts whose runner died: nobody will finish them, and their groups wait for them."""
        with self._client(timeout_s=30.0) as client:
            left = client.open_rollouts()
            for rollout in left:
                gone = wire.FinishRollout(reward=None, outcome="cancelled", cause="interrupted", replaced=True)
                client.finish_rollout(rollout.id, gone)
        if left:
            self._display.say(f"cancelled {len(left)} rollouts that {whose} left open")

    def _watch(self, parts: Parts) -> None:
        steps, policy = self._config.train.steps, self._config.gateway.policy
        rate, looked_s = TokenRate(), 0.0
        drain = Drain(self._config.drain_s)
        with self._client(timeout_s=10.0) as client:
            while not parts.done("trainer") and not (self._folder.path / eval_log.TRAINED).exists():
                self._tick(parts)
                if time.monotonic() - looked_s >= LOOK_EVERY_S:
                    looked_s = time.monotonic()
                    metrics = read_metrics(self._folder.metrics)
                    self._tell_steps(metrics)
                    drain.check(len(metrics), looked_s, runner_done=parts.done("runner"))
                    status = self._look(client) if parts.ready("gateway") else None
                    if status is not None:
                        tokens_per_s = rate.add(looked_s, status.generated_tokens)
                        self._display.show(snapshot(status, metrics, policy, steps, tokens_per_s))
                time.sleep(0.2)
        self._tell_steps(read_metrics(self._folder.metrics))
        self._last_evaluation(parts)

    def _last_evaluation(self, parts: Parts) -> None:
        """Let the evaluator judge what the training ended with; the runner ends first, the engine is its alone.

        Raises ChildError when it takes too long.
        """
        if "evaluator" not in parts:
            return
        self._stop_part(parts, "runner")
        self._display.say("the training is done; evaluating its last version")
        parts.may_end("evaluator")
        (self._folder.path / "evals").mkdir(exist_ok=True)
        (self._folder.path / "evals" / FINISH).touch()
        self._until(
            parts,
            lambda: parts.done("evaluator"),
            self._config.eval.end_patience_s,
            "the last evaluation did not end",
        )
        (self._folder.path / eval_log.OVER).touch()
        self._until(parts, lambda: parts.done("trainer"), TOLD_WITHIN_S, "the trainer did not end")

    def _end_rollouts(self, parts: Parts) -> None:
        """The trainer has made its steps: agents end, and every group that will not be trained gets its end."""
        self._stop_part(parts, "runner")
        self._until_answered(parts, self._close_groups)

    def _close_groups(self) -> None:
        self._cancel_left_open("the runner")
        with self._client(timeout_s=30.0) as client:
            closed = client.close_groups(wire.CloseGroups(policy=self._config.gateway.policy))
        if closed.dropped_groups:
            self._display.say(f"{closed.dropped_groups} groups were not needed any more: dropped, run_ended")

    def _until_answered(self, parts: Parts, ask: Callable[[], None]) -> None:
        """`ask` the gateway until it answers; it may be being started again. Raises ChildError when it never does."""

        def answered() -> bool:
            if not parts.ready("gateway"):
                return False
            try:
                ask()
            except GatewayError as error:
                self._display.say(f"asking the gateway again: {error}")
                return False
            return True

        patience_s = self._config.engine.start_timeout_s + self._config.gateway.start_timeout_s
        self._until(parts, answered, patience_s, "the gateway did not answer")

    def _until(self, parts: Parts, true: Callable[[], bool], patience_s: float, otherwise: str) -> None:
        """Wait, restarting what dies. Raises ChildError after `patience_s`."""
        give_up_s = time.monotonic() + patience_s
        while not true():
            self._tick(parts)
            if time.monotonic() > give_up_s:
                raise ChildError(f"{otherwise} in {patience_s:.0f} s")
            time.sleep(0.2)

    def _stop_part(self, parts: Parts, name: str) -> None:
        """End one part that is not needed any more; one that is dead is not started again."""
        parts.stopping([name])
        parts.children.stop(parts.children.by_name[name], signal.SIGTERM, self._config.stop_grace_s)

    def _tell_evaluations(self) -> None:
        """Say what has been evaluated since, and every alarm."""
        found = eval_log.read(self._folder.path)
        for record in found[self._told :]:
            self._display.say(eval_log.sentence(record))
            for alarm in record["alarms"]:
                self._alarm(alarm)
        self._told = len(found)

    def _tell_fine_tuning(self, out: Path) -> str:
        """Say its alarms as they come, some before its first step; its result in a line, once it is there."""
        found = learnt(out)
        for alarm in (said := found.get("alarms", []))[self._told_learning :]:
            self._alarm(alarm)
        self._told_learning = len(said)
        return in_a_line(found)

    def _tell_steps(self, metrics: Sequence[dict[str, Any]]) -> None:
        """Say the alarms of the steps that were made since."""
        for record in metrics[self._told_steps :]:
            for alarm in filter(None, (publication_alarm(record), gradient_alarm(record))):
                self._alarm(alarm)
        self._told_steps = len(metrics)

    def _alarm(self, text: str) -> None:
        self._display.say(f"ALARM {text}")
        self._folder.event("alarm", text=text)

    def _look(self, client: GatewayClient) -> wire.Status | None:
        try:
            self._status = client.status()
        except GatewayError:
            return None  # busy or just gone: if it is gone, the next tick says so
        return self._status

    def _stop(self, parts: Parts) -> None:
        """Runner and trainer first, so that their last words reach the gateway; the engine last."""
        grace_s, children = self._config.stop_grace_s, parts.children
        parts.stopping(children.by_name)
        above = [children.by_name[name] for name in ("runner", "evaluator", "trainer") if name in children.by_name]
        for child in above:
            children.send(child, signal.SIGTERM)
        for child in above:
            children.stop(child, None, grace_s)
        if "gateway" in children.by_name and children.by_name["gateway"].alive:
            with self._client(timeout_s=10.0) as client:
                self._look(client)
        for name in ("gateway", "engine"):
            if name in children.by_name:
                children.stop(children.by_name[name], signal.SIGTERM, grace_s)
        self._display.say("all parts have ended")

    def _client(self, timeout_s: float) -> GatewayClient:
        return GatewayClient(self._gateway_url, self._folder.admin_key.read_text().strip(), timeout_s=timeout_s)

    def _conclude(self) -> int:
        report = ending.verify_store(self._folder.store)
        lineage = ending.lineage_of(self._folder.path)
        for problem in lineage["problems"]:
            self._alarm(f"lineage: {problem}")
        summary = ending.summarise(
            self._status,
            report,
            read_metrics(self._folder.metrics),
            self._folder.store,
            lineage,
            self._folder.restarts(),
            self._folder.alarms(),
        )
        self._folder.update(state="finished", ended_utc_s=time.time(), summary=summary.values)
        summary.print_table()
        for alarm in last_of_each(self._folder.alarms()):
            print(f"ALARM {alarm}")
        print(f"browse it: turngate view {self._folder.path}")
        if EMBEDDED in self._config.train.report_to:
            print(f"curves: {how_to_look(self._folder.path)}")
        print(json.dumps(summary.values), flush=True)
        return 0 if report.sound and lineage["ok"] else 1
