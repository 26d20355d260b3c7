"""What can be known to be wrong before anything starts: harness, options, tasks, reward functions.

`turngate run` begins with it, and `turngate launch` does it before the engine, which takes minutes, is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turngate.harnesses.base import Harness, HarnessOptions, InProcess
from turngate.harnesses.errors import Fault, SettingsWrong
from turngate.harnesses.judging import Judges
from turngate.harnesses.registry import get_harness
from turngate.harnesses.settings import RunSettings
from turngate.tasks.dataset import is_dataset, load_rows
from turngate.tasks.harbor import Task, load_tasks
from turngate.tasks.steps import solution_steps


def check_run(settings: RunSettings) -> tuple[Harness, list[Task]]:
    """The harness and the tasks that `settings` name, once everything about them is known to be right.

    Raises:
        UnknownHarness, SettingsWrong: the harness or its options. TasksError: a task, a dataset or a reward function.
    """
    harness = get_harness(settings.harness)
    _check_options(harness, settings.harness_options)
    tasks = load_rows(settings.tasks, settings.dataset) if is_dataset(settings.tasks) else _harbor(settings.tasks)
    several = next((task for task in tasks if len(task.prompts) > 1), None)
    if several is not None and "prompts" in harness.unsupported:
        raise SettingsWrong(
            f"run.tasks: {several.name} has {len(several.prompts)} prompts, and {harness.unsupported['prompts']}"
        )
    if isinstance(harness, InProcess) and any(task.judge is None and task.environment.is_dir() for task in tasks):
        raise SettingsWrong(f"run.tasks: these tasks have files, which {harness.name} cannot reach; choose an agent")
    _try_judge(tasks[0])
    if settings.teacher == "oracle":
        for task in tasks:
            solution_steps(task.folder)
    return harness, tasks


def needs_sandbox(harness: Harness, tasks: Sequence[Task]) -> bool:
    """Whether anything would run in a sandbox: an agent, or a verifier."""
    return not isinstance(harness, InProcess) or any(task.judge is None for task in tasks)


def _harbor(where: str) -> list[Task]:
    return load_tasks(Path(where))


def _check_options(harness: Harness, options: HarnessOptions) -> None:
    """An option that is set to something else than its default, and that the harness cannot follow, is an error."""
    for name, why in harness.unsupported.items():
        field = HarnessOptions.model_fields.get(name)
        if field is not None and getattr(options, name) != field.get_default(call_default_factory=True):
            raise SettingsWrong(f"run.harness_options.{name}: {why}")


def _try_judge(task: Task) -> None:
    """Let the reward functions judge an empty answer, so that what they lack is known now.

    Raises:
        SettingsWrong: they cannot.
    """
    if task.judge is None:
        return
    judges = Judges()
    try:
        judges.ask(task.judge, "", task.verifier_timeout_s)
    except Fault as fault:
        if fault.cause != "reward_missing":  # None for an empty answer is an answer
            raise SettingsWrong(f"run.dataset.rewards: {fault.detail}") from fault
    finally:
        judges.close()
