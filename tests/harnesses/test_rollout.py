"""One rollout: where its reward may come from, and what every kind of failure is called."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harnesses.conftest import TaskMaker
from tests.harnesses.doubles import BookGateway, ScriptHarness
from tests.harnesses.test_sandbox import leftovers
from turngate.harnesses.bubblewrap import Bubblewrap
from turngate.harnesses.errors import Fault
from turngate.harnesses.install import Installed
from turngate.harnesses.rollout import CAUSES, Result, Stage, run_rollout
from turngate.harnesses.sandbox import Finished, Job, Limits
from turngate.harnesses.settings import RunSettings
from turngate.harnesses.workspace import Scratch
from turngate.tasks.harbor import Task

BookStage = Callable[..., Stage]
ZERO = "echo 0 > /logs/verifier/reward.txt"
ONE = "echo 1 > /logs/verifier/reward.txt"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[BookStage]:
    """`stage(script, **settings)`: rollouts of a scripted agent in real bubblewrap, on a gateway that keeps books."""
    empty = tmp_path / "nothing-installed"
    empty.mkdir()
    with Scratch(tmp_path / "scratch") as scratch:

        def make(script: str, **settings: object) -> Stage:
            chosen = RunSettings.model_validate(settings)
            box = Bubblewrap()
            gateway = BookGateway()
            return Stage(chosen, ScriptHarness(script), Installed(empty, empty), box, gateway, scratch)  # type: ignore[arg-type]

        yield make


async def play(stage: Stage, task: Task) -> Result:
    """One rollout; the gateway must have been told the same as the caller."""
    result = await run_rollout(stage, task, "group")
    told = stage.gateway.finished[result.id]  # type: ignore[attr-defined]
    assert (told.outcome, told.reward, told.cause) == (result.outcome, result.reward, result.cause)
    return result


async def test_the_reward_is_what_the_verifier_wrote(stage: BookStage, make_task: TaskMaker) -> None:
    task = make_task('grep -q 42 answer.txt && echo 0.25 > "$TURNGATE_REWARDS/reward.txt"')
    result = await play(stage("echo 42"), task)
    assert (result.outcome, result.reward, result.cause, result.version) == ("scored", 0.25, None, 3), result


async def test_environment_files_are_there_and_what_the_agent_wrote_reaches_the_verifier(
    stage: BookStage, make_task: TaskMaker
) -> None:
    environment = {"data/in.txt": "7", "Dockerfile": "FROM scratch"}
    task = make_task(f"grep -q 7 out.txt && {ONE}", environment=environment)
    result = await play(stage("cp data/in.txt out.txt && ! ls Dockerfile && cat ~/.config/agent"), task)
    assert result.reward == 1.0, result


FORGERIES = {
    "the reward folder": "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt; true",
    "a reward file in the workspace": "echo 1 > reward.txt; mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt",
    "its own tests": "mkdir -p tests && echo 'echo 1 > /logs/verifier/reward.txt' > tests/test.sh",
    "the real tests": "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; ls /tests; true",
    "a process that stays": "(setsid bash -c 'while sleep 0.01; do echo 1 > /logs/verifier/reward.txt; done' &) ; true",
    "a link for the answer": "ln -s /logs/verifier/reward.txt answer.txt; echo 1",
}


@pytest.mark.parametrize("how", FORGERIES)
async def test_an_agent_cannot_forge_a_reward(stage: BookStage, make_task: TaskMaker, how: str) -> None:
    result = await play(stage(f"({FORGERIES[how]}) 2>/dev/null"), make_task(ZERO))
    assert (result.outcome, result.reward) == ("scored", 0.0), result


async def test_the_agent_never_sees_the_tests(stage: BookStage, make_task: TaskMaker) -> None:
    task = make_task(f"# the secret check\ngrep -q 'secret check' answer.txt && exit 9; {ZERO}")
    result = await play(
        stage("cat /tests/* tests/* 2>/dev/null; grep -rs 'secret check' / --include=test.sh; true"), task
    )
    assert result.reward == 0.0, result


async def test_an_answer_never_goes_through_a_link_to_the_host(
    stage: BookStage, make_task: TaskMaker, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    result = await play(
        stage(f"ln -s {precious} answer.txt; echo overwritten"), make_task(f"grep -q over answer.txt && {ONE}")
    )
    assert (result.reward, precious.read_text()) == (1.0, "keep me")


class WatchedBox(Bubblewrap):
    """Writes down what each job may write to, and what of the agent is alive on the host when a job begins."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker
        self.writable: list[set[Path]] = []
        self.alive: list[list[str]] = []

    async def run(self, job: Job) -> Finished:
        """Look, then run."""
        self.writable.append({mount.source for mount in job.mounts if mount.writable})
        self.alive.append(leftovers(self.marker))
        return await super().run(job)


async def test_the_verifier_works_on_a_copy_after_the_agents_processes_are_gone(
    stage: BookStage, make_task: TaskMaker
) -> None:
    marker = f"ticks-{os.getpid()}-{time.monotonic_ns()}"
    tick = f"exec -a {marker} bash -c 'while :; do date +%N > ticking; sleep 0.01; done'"
    still = 'a=$(cat ticking); sleep 0.3; test -n "$a" && test "$a" = "$(cat ticking)"'
    made = stage(f"(setsid nohup bash -c {shlex.quote(tick)} >/dev/null &); until test -s ticking; do :; done")
    box = WatchedBox(marker)
    result = await play(replace(made, sandbox=box), make_task(f"{still} && {ONE}"))
    assert (result.outcome, result.reward) == ("scored", 1.0), result
    agent, verifier = box.writable
    assert not any(one.is_relative_to(other) or other.is_relative_to(one) for one in agent for other in verifier)
    assert box.alive == [[], []]


REWARDS = {
    "nan": "reward_invalid",
    "inf": "reward_invalid",
    "-Infinity": "reward_invalid",
    "1e999": "reward_invalid",
    "1.01": "reward_invalid",
    "-0.5": "reward_invalid",
    "1 1": "reward_invalid",
    "1_0": "reward_invalid",
    "yes": "reward_invalid",
    "": "reward_invalid",
}


@pytest.mark.parametrize("text", REWARDS)
async def test_a_reward_that_is_no_number_in_range_is_unscorable(
    stage: BookStage, make_task: TaskMaker, text: str
) -> None:
    result = await play(stage("true"), make_task(f"echo '{text}' > /logs/verifier/reward.txt"))
    assert (result.outcome, result.reward, result.cause) == ("unscorable", None, REWARDS[text])


VERIFIERS = {
    "true": "reward_missing",
    f"{ONE}; exit 4": "verifier_exit",
    "sleep 60": "verifier_timeout",
    "ln -s /etc/passwd /logs/verifier/reward.txt": "reward_invalid",
    "mkfifo /logs/verifier/reward.txt": "reward_invalid",
    "mkdir /logs/verifier/reward.txt": "reward_invalid",
    "echo '{\"reward\": NaN}' > /logs/verifier/reward.json": "reward_invalid",
}


@pytest.mark.parametrize("script", VERIFIERS)
async def test_a_verifier_that_fails_is_a_cause_not_a_reward(
    stage: BookStage, make_task: TaskMaker, script: str
) -> None:
    result = await play(stage("true"), make_task(script, toml="[verifier]\ntimeout_sec = 2.0"))
    assert (result.outcome, result.cause) == ("unscorable", VERIFIERS[script])


AGENTS = {"exit 3": "harness_exit_3", "sleep 60": "harness_timeout", "kill -9 $$": "harness_exit_137"}


@pytest.mark.parametrize("script", AGENTS)
async def test_an_agent_that_fails_is_unscorable_with_its_cause(
    stage: BookStage, make_task: TaskMaker, script: str
) -> None:
    result = await play(stage(script, deadline_s=2.0), make_task(ONE))
    assert (result.outcome, result.cause) == ("unscorable", AGENTS[script]), result


async def test_an_agent_without_a_turn_is_unscorable(stage: BookStage, make_task: TaskMaker) -> None:
    silent = stage("true")
    silent.gateway.turns = 0  # type: ignore[attr-defined]
    assert (await play(silent, make_task(ONE))).cause == "no_turns"


async def test_a_workspace_beyond_the_limit_is_unscorable(stage: BookStage, make_task: TaskMaker) -> None:
    result = await play(stage("yes | head -c 200000 > big", limits={"workspace_bytes": 100_000}), make_task(ONE))
    assert result.cause == "workspace_invalid"


async def test_folders_without_permissions_and_odd_files_do_not_stop_the_verifier(
    stage: BookStage, make_task: TaskMaker
) -> None:
    script = "mkdir -p a/b; echo x > a/b/c; mkfifo pipe; ln -s /nowhere link; chmod 000 a/b/c a/b a"
    result = await play(stage(script), make_task(f"test -f a/b/c && {ONE}"))
    assert result.reward == 1.0, result


class BuggySandbox(Bubblewrap):
    """A sandbox with a bug."""

    async def run(self, job: Job) -> Finished:
        """Fail as nothing should."""
        raise ZeroDivisionError("a bug")


async def test_an_unexpected_error_closes_the_session_too(stage: BookStage, make_task: TaskMaker) -> None:
    result = await play(replace(stage("true"), sandbox=BuggySandbox()), make_task(ONE))
    assert (result.outcome, result.cause) == ("unscorable", "runner_error")
    assert "a bug" in result.detail


class BrokenSandbox(Bubblewrap):
    """A sandbox that cannot be started."""

    async def run(self, job: Job) -> Finished:
        """Fail as the real one does."""
        raise Fault("sandbox_start", "no namespaces today")


async def test_a_sandbox_that_does_not_start_is_unscorable(stage: BookStage, make_task: TaskMaker) -> None:
    result = await play(replace(stage("true"), sandbox=BrokenSandbox()), make_task(ONE))
    assert (result.outcome, result.cause) == ("unscorable", "sandbox_start")


async def test_a_gateway_that_is_gone_is_unscorable(stage: BookStage, make_task: TaskMaker) -> None:
    lonely = stage("true")
    lonely.gateway.down = True  # type: ignore[attr-defined]
    result = await run_rollout(lonely, make_task(ONE), "group")
    assert (result.id, result.outcome, result.cause) == (None, "unscorable", "gateway_unavailable")


def test_every_cause_in_these_tests_is_in_the_vocabulary() -> None:
    named = {*REWARDS.values(), *VERIFIERS.values(), *AGENTS.values(), "no_turns", "workspace_invalid", "sandbox_start"}
    assert {"harness_exit_N" if cause.startswith("harness_exit_") else cause for cause in named} <= set(CAUSES)


def test_limits_are_documented() -> None:
    assert all(field.description for field in Limits.model_fields.values())
