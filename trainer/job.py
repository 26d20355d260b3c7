"""The parts of a run in order: engine, gateway, runner and trainer up; watched; down again; the store checked.

Every part is a process of its own below the warden. A part that ends by itself ends the run with its reason, except the
trainer with status 0: then the run is done.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from turngate.proxy import wire
from turngate.proxy.client import GatewayClient, GatewayError
from turngate.trainer import engine_process as engine
from turngate.trainer import eval_log
from turngate.trainer import summary as ending
from turngate.trainer.children import Child, ChildError, Children, tail
from turngate.trainer.evaluator import FINISH
from turngate.trainer.launch_config import (
    LaunchConfig,
    Places,
    evaluator_settings,
    runner_settings,
    trainer_settings,
)
from turngate.trainer.models import resolve_model
from turngate.trainer.progress import Display, TokenRate, read_metrics, snapshot
from turngate.trainer.run_folder import RunFolder
from turngate.trainer.warm_start import demonstration_settings, sft_settings

LOOK_EVERY_S = 2.0
ENDING = ("trainer", "runner", "demonstrations", "sft")
"""Parts that may end with status 0 while the run goes on."""


class Drain:
    """Notices that the runner is done but the trainer waits for groups that will never come."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._steps = -1
        self._since_s = 0.0

    def check(self, runner: Child, steps: int, now_s: float) -> None:
        """Raise ChildError when the runner ended well and no step was made for the patience since."""
        if runner.alive or steps != self._steps:
            self._steps, self._since_s = steps, now_s
        elif now_s - self._since_s > self._patience_s:
            raise ChildError(
                f"the runner has done all its rollouts, but the trainer stands at {steps} steps for "
                f"{self._patience_s:.0f} s: give the run more groups (those without variance do not count)"
            )


class Job:
    """One run from start to summary. `run` may raise TrainerError or KeyboardInterrupt; no process outlives it."""

    def __init__(self, config: LaunchConfig, folder: RunFolder, display: Display) -> None:
        self._config = config
        self._folder = folder
        self._display = display
        self._parts: dict[str, dict[str, Any]] = {}
        self._gateway_url = ""
        self._engine_url = ""
        self._status: wire.Status | None = None
        self._told = len(eval_log.read(folder.path))

    def run(self) -> int:
        """0 when the trainer made its steps and the store is sound; 1 when the store is not."""
        self._folder.update(id=self._folder.id, state="running", launcher_pid=os.getpid(), started_utc_s=time.time())
        self._display.say(f"model {self._config.model}")
        model = resolve_model(self._config.model)
        with Children(self._folder.logs) as children:
            try:
                self._start(children, model)
                self._watch(children)
            except KeyboardInterrupt:
                self._display.say("stopping (Ctrl-C again to kill at once)")
                self._stop(children)
                raise
            self._stop(children)
        self._display.stop()
        return self._conclude()

    def _start(self, children: Children, model: Path | str) -> None:
        config = self._config
        self._engine_url = config.engine.url or self._start_engine(children, model)
        port = engine.own_port(config.gateway.port, "gateway")
        self._gateway_url = f"http://{engine.HOST}:{port}"
        argv = [*ending.CLI, "proxy", "--engine", self._engine_url, "--store", str(self._folder.store)]
        argv += ["--host", engine.HOST, "--port", str(port), "--policy", config.gateway.policy]
        argv += ["--run", self._folder.id, "--durability", config.gateway.durability, "--tokenizer", str(model)]
        argv += ["--admin-key-file", str(self._folder.admin_key), *config.gateway.extra_args]
        gateway = self._spawn(children, "gateway", argv, port=port)
        self._await(children, gateway, f"{self._gateway_url}/readyz", config.gateway.start_timeout_s, port)
        self._cancel_left_open()
        places = Places(
            self._gateway_url, self._folder.admin_key, self._folder.path, model=str(model), engine_url=self._engine_url
        )
        (self._folder.path / "evals" / FINISH).unlink(missing_ok=True)
        if config.eval.tasks:
            self._spawn_with(children, "evaluator", "eval", evaluator_settings(config, places))
        adapter = self._warm_up(children, places)
        self._spawn_with(children, "trainer", "train", trainer_settings(config, places, adapter))
        if adapter is not None:
            self._await_first_version(children)
        self._spawn_with(children, "runner", "run", runner_settings(config, places))

    def _spawn_with(self, children: Children, name: str, command: str, settings: BaseModel) -> Child:
        """Start `turngate COMMAND` with these settings, which are kept in the run's folder."""
        path = self._folder.path / f"{name}.yaml"
        values = settings.model_dump(mode="json", exclude_none=True)
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return self._spawn(children, name, [*ending.CLI, command, "--config", str(path)])

    def _warm_up(self, children: Children, places: Places) -> Path | None:
        """The adapter that training begins from, made now unless it is there; None without `warm_start`."""
        wanted, out = self._config.warm_start, self._folder.path / "warm_start"
        if wanted is None or wanted.adapter is not None:
            return None if wanted is None or wanted.adapter is None else wanted.adapter.absolute()
        if (out / "adapter").is_dir():
            return out / "adapter"
        if wanted.demonstrations is not None:
            run = runner_settings(self._config, places)
            settings = demonstration_settings(run, wanted.demonstrations, self._folder.path / "demonstrations")
            self._through(children, self._spawn_with(children, "demonstrations", "run", settings))
        train = trainer_settings(self._config, places, None)
        learning = sft_settings(train, wanted, places.store, out)
        self._through(children, self._spawn_with(children, "sft", "sft", learning))
        return out / "adapter"

    def _through(self, children: Children, stage: Child) -> None:
        """Wait until a stage has ended well."""
        began_s = time.monotonic()
        while stage.alive:
            children.poll()
            self._check(children)
            self._tell_evaluations()
            self._display.waiting(f"{stage.name} is at work, {time.monotonic() - began_s:.0f} s so far")
            time.sleep(0.2)
        self._check(children)
        self._display.say(f"{stage.name} done after {time.monotonic() - began_s:.0f} s: {tail(stage.log, 1).strip()}")

    def _await_first_version(self, children: Children) -> None:
        """Agents begin when the adapter is routed to: what the base does is not what is to be trained."""
        with self._client(timeout_s=10.0) as client:
            while children.by_name["trainer"].alive:
                children.poll()
                self._check(children)
                self._tell_evaluations()
                status = self._look(client)
                if status is not None and any(policy.version > 0 for policy in status.policies):
                    return
                self._display.waiting("the trainer is starting and publishes the adapter to begin with")
                time.sleep(0.5)
            self._check(children)

    def _cancel_left_open(self) -> None:
        """Rollouts whose runner died with the run before: nobody will finish them, and their groups wait for them."""
        if self._folder.resumed:
            with GatewayClient(self._gateway_url, self._folder.admin_key.read_text().strip(), timeout_s=30) as client:
                left = client.open_rollouts()
                for rollout in left:
                    gone = wire.FinishRollout(reward=None, outcome="cancelled", cause="interrupted", replaced=True)
                    client.finish_rollout(rollout.id, gone)
            if left:
                self._display.say(f"cancelled {len(left)} rollouts that the run before left open")

    def _start_engine(self, children: Children, model: Path | str) -> str:
        settings = self._config.engine
        distribution, version = engine.engine_version()
        port = engine.own_port(settings.port, "engine")
        argv = engine.engine_argv(settings, model, port, version)
        env = engine.engine_env(settings, model, distribution)
        child = self._spawn(children, "engine", argv, env=env, port=port)
        url = f"http://{engine.HOST}:{port}"
        self._await(children, child, f"{url}/health", settings.start_timeout_s, port)
        return url

    def _spawn(
        self,
        children: Children,
        name: str,
        argv: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        port: int | None = None,
    ) -> Child:
        child = children.start(name, argv, env)
        self._parts[name] = {"pid": child.pid, "port": port, "argv": list(argv)}
        self._folder.update(parts=self._parts)
        self._display.say(f"{name} started (pid {child.pid}" + (f", port {port})" if port else ")"))
        return child

    def _await(self, children: Children, child: Child, url: str, timeout_s: float, port: int) -> None:
        def tick(waited_s: float) -> None:
            if waited_s > 5:
                self._display.waiting(f"{child.name} is starting, {waited_s:.0f} s so far")

        started_s = time.monotonic()
        engine.wait_healthy(url, child, children, timeout_s, tick)
        engine.check_owned(port, children)
        self._display.say(f"{child.name} ready after {time.monotonic() - started_s:.0f} s")

    def _watch(self, children: Children) -> None:
        metrics_path = self._folder.metrics
        steps, policy = self._config.train.steps, self._config.gateway.policy
        rate, looked_s = TokenRate(), 0.0
        drain = Drain(self._config.drain_s)
        with self._client(timeout_s=10.0) as client:
            while children.by_name["trainer"].alive:
                children.poll()
                self._check(children)
                self._tell_evaluations()
                if time.monotonic() - looked_s >= LOOK_EVERY_S:
                    looked_s = time.monotonic()
                    metrics = read_metrics(metrics_path)
                    drain.check(children.by_name["runner"], len(metrics), looked_s)
                    status = self._look(client)
                    if status is not None:
                        tokens_per_s = rate.add(looked_s, status.generated_tokens)
                        self._display.show(snapshot(status, metrics, policy, steps, tokens_per_s))
                time.sleep(0.2)
            self._check(children)
        self._last_evaluation(children)

    def _last_evaluation(self, children: Children) -> None:
        """Let the evaluator judge what the training ended with; the runner ends first, the engine is its alone.

        Raises ChildError when it takes too long.
        """
        evaluator = children.by_name.get("evaluator")
        if evaluator is None:
            return
        children.stop(children.by_name["runner"], signal.SIGTERM, self._config.stop_grace_s)
        self._display.say("the training is done; evaluating its last version")
        (self._folder.path / "evals").mkdir(exist_ok=True)
        (self._folder.path / "evals" / FINISH).touch()
        give_up_s = time.monotonic() + self._config.eval.end_patience_s
        while evaluator.alive:
            children.poll()
            self._tell_evaluations()
            for name in ("engine", "gateway"):
                if name in children.by_name and not children.by_name[name].alive:
                    raise ChildError(children.by_name[name].reason())
            if time.monotonic() > give_up_s:
                raise ChildError(f"the last evaluation did not end in {self._config.eval.end_patience_s:.0f} s")
            time.sleep(0.2)
        if evaluator.code != 0:
            raise ChildError(evaluator.reason())
        self._tell_evaluations()

    def _tell_evaluations(self) -> None:
        """Say what has been evaluated since, and every alarm."""
        found = eval_log.read(self._folder.path)
        for record in found[self._told :]:
            self._display.say(eval_log.sentence(record))
            for alarm in record["alarms"]:
                self._display.say(f"ALARM {alarm}")
        self._told = len(found)

    def _check(self, children: Children) -> None:
        for child in children.by_name.values():
            if child.alive or (child.code == 0 and child.name in ENDING):
                continue
            raise ChildError(child.reason())

    def _look(self, client: GatewayClient) -> wire.Status | None:
        try:
            self._status = client.status()
        except GatewayError:
            return None  # busy or just gone: if it is gone, the next check says so
        return self._status

    def _stop(self, children: Children) -> None:
        """Runner and trainer first, so that their last words reach the gateway; the engine last."""
        grace_s = self._config.stop_grace_s
        parts = [children.by_name[name] for name in ("runner", "evaluator", "trainer") if name in children.by_name]
        for child in parts:
            children.send(child, signal.SIGTERM)
        for child in parts:
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
        summary = ending.summarise(self._status, report, read_metrics(self._folder.metrics), self._folder.store)
        self._folder.update(state="finished", ended_utc_s=time.time(), summary=summary.values)
        summary.print_table()
        print(f"browse it: turngate view {self._folder.path}")
        print(json.dumps(summary.values), flush=True)
        return 0 if report.sound else 1
