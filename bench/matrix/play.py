"""One run of the matrix: an agent in its sandbox, a gateway of its own, a tap, and a fake engine with a script.

A run gets everything anew, so that nothing of another can pass for it. It judges nothing but what it saw.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.matrix import witness
from bench.matrix.expectations import Expected
from bench.matrix.prompts import Talk
from bench.matrix.scenarios import Scenario
from bench.matrix.verdict import Heard, Run, Seen, judge
from tests.fake_engine.runner import FakeEngine
from tests.gateway_process import GatewayProcess
from tests.tap import Exchange, Generation, Tap
from turngate.harnesses.base import Endpoint, Harness, HarnessOptions
from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.install import install
from turngate.harnesses.patient import PatientGateway
from turngate.harnesses.registry import get_harness
from turngate.harnesses.rollout import Result, Stage, run_rollout
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.proxy import wire
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.turns import Turn, by_id, prompt_ids
from turngate.proxy.verify import verify_store
from turngate.tasks.harbor import Task, load_task

CONTEXT_TOKENS = 32_000
DEADLINE_S = 240.0
GROUP = "matrix"


@dataclass(frozen=True)
class Wires:
    """What a run is made of; the tap's exchanges count from `begun` on."""

    engine: FakeEngine
    tap: Tap
    gateway: GatewayProcess
    begun: int

    def exchanges(self) -> list[Exchange]:
        """What crossed the wire for the agent's turns."""
        return self.tap.exchanges[self.begun :]


async def play(name: str, title: str, scenario: Scenario, expected: Expected, model: Path, folder: Path) -> Run:
    """Run one scenario with one agent; `folder` is empty and kept."""
    talk = Talk.of_conversations(scenario.talk)
    with ExitStack() as stack:
        fake = FakeEngine(model, talk, template=scenario.template, settings=scenario.engine)
        engine = stack.enter_context(fake)
        tap = stack.enter_context(Tap(engine.url))
        options = ("--tokenizer", str(model), *scenario.gateway)
        gateway = stack.enter_context(GatewayProcess(tap.url, folder / "store", *options))
        scratch = stack.enter_context(Scratch(folder / "scratch"))
        stage = _stage(name, scenario, gateway, scratch, folder / "faults")
        wires = Wires(engine, tap, gateway, len(tap.exchanges))
        engine.fail(scenario.fault)
        result = await run_rollout(stage, _task(scenario, folder / "task"), GROUP)
        leased = _leased(gateway, result)
        with StoreReader(gateway.store) as reader:
            turns = reader.turns(result.id or "")
        return judge(name, title, expected, _seen(result, turns, leased, wires, talk))


def _stage(name: str, scenario: Scenario, gateway: GatewayProcess, scratch: Scratch, faults: Path) -> Stage:
    settings = RunSettings(
        gateway=gateway.url,
        harness=name,
        harness_options=HarnessOptions(**{"context_tokens": CONTEXT_TOKENS, **scenario.options}),
        sampling=dict(scenario.sampling),
        history=scenario.history,
        group_size=2,
        retries=0,
        deadline_s=DEADLINE_S,
    )
    harness = get_harness(name)
    patient = PatientGateway(gateway.client, settings.gateway_patience_s)
    configured = Tweaked(harness, scenario.tweak) if scenario.tweak else harness
    return Stage(settings, configured, install(harness), Bubblewrap(), patient, scratch, faults)


class Tweaked:
    """A harness with some of its JSON configuration files patched, for what has no option."""

    def __init__(self, harness: Harness, patches: Any) -> None:
        self._harness, self._patches = harness, patches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._harness, name)

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """Its files, patched."""
        files = self._harness.files(endpoint, options)
        for path, patch in self._patches.items():
            files[path] = json.dumps(_merged(json.loads(files[path]), patch))
        return files


def _merged(value: Any, patch: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(patch, dict):
        return patch
    return {**value, **{key: _merged(value.get(key), one) for key, one in patch.items()}}


def _task(scenario: Scenario, folder: Path) -> Task:
    """A task whose verifier asks for what the scenario's commands should have done."""
    names = [f"prompt{number}.md" for number in range(len(scenario.prompts))]
    files = dict(zip(names, scenario.prompts, strict=True))
    files["tests/test.sh"] = f"{{ {scenario.check}; }} && echo 1 > /logs/verifier/reward.txt"
    files["task.toml"] = f'version = "1.0"\n[metadata.turngate]\nprompts = {names}\n'
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return load_task(folder)


def _leased(gateway: GatewayProcess, result: Result) -> list[wire.WireRow]:
    """What a trainer gets of the rollout; a second one that never spoke completes its group."""
    if result.outcome != "scored":
        return []
    silent = gateway.client.create_rollout(wire.NewRollout(task=result.task, group=result.group, group_size=2))
    gateway.client.finish_rollout(silent.id, wire.FinishRollout(reward=0.0))
    policy = gateway.client.status().policies[0].policy
    groups = gateway.client.lease(wire.NewLease(policy=policy)).groups
    return [row for group in groups for rollout in group.rollouts for row in rollout.rows]


def _seen(result: Result, turns: list[Turn], leased: list[wire.WireRow], wires: Wires, talk: Talk) -> Seen:
    """What came of the run, the gateway's words beside those of the witness."""

    def truth(prompt: Any) -> str:
        return talk.conversation(wires.engine.engine.tokens.decode([int(one) for one in prompt])).label

    def trained(one: Generation) -> bool:
        return truth(one.prompt) == "main"

    known = by_id(turns)
    prompts = [tuple(prompt_ids(known, turn).tolist()) for turn in turns]
    outside = [_rounded(*row) for row in witness.rows(witness.generations(wires.exchanges()), trained)]
    exact = 0
    for row in map(_outside_form, leased):
        if row in outside:
            outside.remove(row)
            exact += 1
    outcome = result.outcome if result.cause is None else f"{result.outcome}: {result.cause}"
    return Seen(
        status="unsolved" if result.reward == 0 else outcome,
        causes=dict(Counter(str(turn.break_cause) for turn in turns if turn.kind == "break")),
        heard=tuple(Heard(one.label, one.label_reason, truth(p)) for one, p in zip(turns, prompts, strict=True)),
        rows=len(leased),
        exact_rows=exact,
        duplicates=len(prompts) - len(set(prompts)),
        problems=tuple(verify_store(wires.gateway.store).problems),
        unmatched=len(outside) if result.outcome == "scored" else 0,
        detail=result.detail,
    )


def _outside_form(leased: wire.WireRow) -> witness.OutsideRow:
    """A leased row in the witness's form."""
    row = leased.unpack()
    pairs = zip(row.logprobs.tolist(), row.mask.tolist(), strict=True)
    return tuple(row.ids.tolist()), tuple(logprob if mask else None for logprob, mask in pairs)


def _rounded(ids: tuple[int, ...], logprobs: tuple[float | None, ...]) -> witness.OutsideRow:
    """The row with its log-probs as the store keeps them."""
    return ids, tuple(None if one is None else float(np.float32(one)) for one in logprobs)
