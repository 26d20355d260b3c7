"""A task's solution as steps: what an agent would call, one tool call after another, and the words it ends with.

`solution/steps.json` holds them beside `solve.sh`, so that a harness's own tools can play a solution. Values and
conversions only; a step never depends on what an earlier one printed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from turngate.tasks.errors import TaskInvalid

STEPS_FILE = Path("solution", "steps.json")


class _Step(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Bash(_Step):
    """Run a shell command in the workspace."""

    tool: Literal["bash"] = "bash"
    command: str = Field(min_length=1)


class Read(_Step):
    """Look at a file; `path` is relative to the workspace."""

    tool: Literal["read"] = "read"
    path: str = Field(min_length=1)


class Write(_Step):
    """Write a whole file, its folders too."""

    tool: Literal["write"] = "write"
    path: str = Field(min_length=1)
    content: str


class Edit(_Step):
    """Replace `old`, which the file holds exactly once, by `new`."""

    tool: Literal["edit"] = "edit"
    path: str = Field(min_length=1)
    old: str = Field(min_length=1)
    new: str


class Say(_Step):
    """The final message; always the last step."""

    tool: Literal["say"] = "say"
    text: str = Field(min_length=1)


Step = Annotated[Bash | Read | Write | Edit | Say, Field(discriminator="tool")]
_STEPS: TypeAdapter[list[Step]] = TypeAdapter(list[Step])


def load_steps(task_folder: Path) -> list[Step]:
    """The steps of the task in `task_folder`; the last one is a `Say`.

    Raises:
        TaskInvalid: there is no steps.json, or it is wrong; the message names the step and the key.
    """
    path = task_folder / STEPS_FILE
    try:
        steps = _STEPS.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise TaskInvalid(f"{path}: missing; a solution that is to be played as tool calls needs its steps") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise TaskInvalid(f"{path}: {key}: {first['msg']}") from None
    if not steps or not isinstance(steps[-1], Say) or any(isinstance(step, Say) for step in steps[:-1]):
        raise TaskInvalid(f'{path}: exactly one {{"tool": "say", "text": …}} is wanted, as the last step')
    return steps


def solution_steps(task_folder: Path) -> list[Step]:
    """The steps of a task; one without steps.json but with a solve.sh runs that script as its only command.

    Raises:
        TaskInvalid: it has neither, a wrong steps.json, or an unreadable solve.sh.
    """
    script = task_folder / "solution" / "solve.sh"
    if (task_folder / STEPS_FILE).exists() or not script.is_file():
        return load_steps(task_folder)
    try:
        command = script.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TaskInvalid(f"{script}: not UTF-8: {error}; save it as UTF-8") from None
    if not command.strip():
        raise TaskInvalid(f"{script}: empty; write the commands that solve the task")
    return [Bash(command=command), Say(text="Done.")]


def dump_steps(steps: Sequence[Step]) -> str:
    """The text of a steps.json."""
    return json.dumps([step.model_dump() for step in steps], indent=1, ensure_ascii=False) + "\n"


def as_shell(step: Step) -> str:
    """The step as a shell command, for solve.sh and for agents whose only tool is a shell; empty for a `Say`."""
    match step:
        case Bash():
            return step.command
        case Read():
            return f"cat {shlex.quote(step.path)}"
        case Write():
            folder = Path(step.path).parent
            make = f"mkdir -p {shlex.quote(str(folder))}\n" if str(folder) != "." else ""
            return f"{make}cat > {shlex.quote(step.path)} <<'EOF'\n{step.content.removesuffix(chr(10))}\nEOF"
        case Edit():
            change = f"text.replace({step.old!r}, {step.new!r}, 1)"
            path = repr(step.path)
            return f"python3 - <<'EOF'\ntext = open({path}).read()\nopen({path}, 'w').write({change})\nEOF"
        case Say():
            return ""


def solve_script(steps: Sequence[Step]) -> str:
    """The text of a solve.sh that does the steps, and stops at the first that fails."""
    lines = [line for step in steps if (line := as_shell(step))]
    return "\n".join(["#!/bin/bash", "set -e", *lines]) + "\n"
