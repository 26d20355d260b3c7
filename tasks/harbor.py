"""Harbor task directories: task.toml, instruction.md, environment/, tests/, solution/ as frozen values.

What Harbor does not say stands under `[metadata.turngate]`: further prompts of the same session, the reward's range,
and whether the agent's final answer is put into the workspace for the verifier. A wrong task is refused when it is
loaded, never in the middle of a run.
"""

from __future__ import annotations

import difflib
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from turngate.tasks.errors import NoSuchTasks, TaskInvalid
from turngate.tasks.judges import Judge
from turngate.tasks.resolve import task_folder

IMAGE_FILES = frozenset({"Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore"})
Seconds = Annotated[float, Field(gt=0)]


class _Agent(BaseModel):
    timeout_sec: Seconds | None = None


class _Verifier(BaseModel):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}


class _Environment(BaseModel):
    workdir: str = "/workspace"


class _Turngate(BaseModel):
    """Our own table is strict: a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid")
    prompts: list[str] = Field(default=["instruction.md"], min_length=1)
    reward_range: tuple[float, float] = (0.0, 1.0)
    answer_file: str | None = "answer.txt"


class _Metadata(BaseModel):
    turngate: _Turngate = _Turngate()


class _TaskToml(BaseModel):
    """The keys we use; Harbor's others are allowed and left alone, not so a misspelling of one of ours."""

    metadata: _Metadata = _Metadata()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. `answer_file` is relative to the workspace; `digest` is the sha256 of all its files.

    `judge` is set where Python functions score the answer instead of tests/test.sh; `system` is a system prompt of the
    task's own.
    """

    name: str
    folder: Path
    prompts: tuple[str, ...]
    workdir: PurePosixPath
    agent_timeout_s: float | None
    verifier_timeout_s: float
    verifier_env: Mapping[str, str]
    reward_low: float
    reward_high: float
    answer_file: str | None
    digest: str
    system: str | None = None
    judge: Judge | None = None

    @property
    def environment(self) -> Path:
        """Files the workspace starts with (it may not exist)."""
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        """The verifier's files; the agent never sees them."""
        return self.folder / "tests"


def load_tasks(root: Path) -> list[Task]:
    """The task at `root`, or all tasks below it, sorted by name; `root` may name one of our own sets, see `resolve`.

    Raises:
        NoSuchTasks: there is no such folder. TaskInvalid: it has no task, or one of them is wrong.
    """
    root = task_folder(root)
    if (root / "task.toml").is_file():
        return [load_task(root)]
    folders = sorted(path.parent for path in root.rglob("task.toml"))
    if not root.exists():
        raise NoSuchTasks(f"{root}: no such folder, and no set of that name; there are words, dataops:train and others")
    if root.is_file():
        raise TaskInvalid(f"{root}: is a file; give the task's folder or a folder of them")
    if not folders:
        raise TaskInvalid(f"{root}: no task.toml here or below; give a Harbor task directory or a folder of them")
    return [load_task(folder, str(folder.relative_to(root))) for folder in folders]


def task_folders(root: Path) -> list[Path]:
    """The task directories at or below `root`, loadable or not; empty where there are none."""
    root = task_folder(root)
    return [root] if (root / "task.toml").is_file() else sorted(path.parent for path in root.rglob("task.toml"))


def load_task(folder: Path, name: str | None = None) -> Task:
    """The task in `folder`.

    Raises:
        TaskInvalid: a file is missing or unreadable, or a key is wrong; the message names it and the fix.
    """
    try:
        return _load(folder, name)
    except OSError as error:
        raise TaskInvalid(f"{error.filename or folder}: cannot be read: {error.strerror}") from error


def _load(folder: Path, name: str | None) -> Task:
    raw = _parse(folder / "task.toml")
    if raw.get("steps"):
        raise TaskInvalid(
            f"{folder / 'task.toml'}: [[steps]] (one verifier a step) is not supported; use "
            "[metadata.turngate] prompts for several messages with one verifier"
        )
    _refuse_misspelt(folder / "task.toml", raw, _TaskToml)
    try:
        config = _TaskToml.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        fix = f"{first['msg']} (got {first.get('input')!r:.80})"
        if first["type"] == "extra_forbidden":
            fix = f"unknown key; those there are: {', '.join(_Turngate.model_fields)}"
        elif first["type"] == "model_type":
            fix = f"must be a table, [{key}] (got {first.get('input')!r:.80})"
        raise TaskInvalid(f"{folder / 'task.toml'}: {key}: {fix}") from None
    ours = config.metadata.turngate
    low, high = ours.reward_range
    if not low < high or not -1e9 < low < high < 1e9:
        raise TaskInvalid(f"{folder / 'task.toml'}: metadata.turngate.reward_range must be [low, high] with low < high")
    workdir = PurePosixPath(config.environment.workdir)
    if not workdir.is_absolute() or len(workdir.parts) < 2 or ".." in workdir.parts:
        raise TaskInvalid(f"{folder / 'task.toml'}: environment.workdir must be an absolute path below /")
    if ours.answer_file is not None and PurePosixPath(ours.answer_file).name != ours.answer_file:
        raise TaskInvalid(f"{folder / 'task.toml'}: metadata.turngate.answer_file must be a plain file name")
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskInvalid(
            f"{folder / 'tests' / 'test.sh'}: missing; it must write a number to /logs/verifier/reward.txt"
        )
    if (folder / "environment").exists() and not (folder / "environment").is_dir():
        raise TaskInvalid(f"{folder / 'environment'}: must be a folder, of the files that the workspace starts with")
    return Task(
        name=name or folder.resolve().name,
        folder=folder.resolve(),
        prompts=tuple(_prompt(folder, file) for file in ours.prompts),
        workdir=workdir,
        agent_timeout_s=config.agent.timeout_sec,
        verifier_timeout_s=config.verifier.timeout_sec,
        verifier_env=config.verifier.env,
        reward_low=low,
        reward_high=high,
        answer_file=ours.answer_file,
        digest=_digest(folder),
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskInvalid(f"{path}: missing; every Harbor task has one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskInvalid(f"{path}: not TOML: {error}") from None


def _refuse_misspelt(path: Path, raw: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    """Refuse a key that is nearly one of `model`'s: Harbor has keys that we do not know, but none so close to ours."""
    for key, value in raw.items():
        field = model.model_fields.get(key)
        if field is not None:
            below = field.annotation
            if isinstance(value, dict) and isinstance(below, type) and issubclass(below, BaseModel):
                _refuse_misspelt(path, value, below, f"{prefix}{key}.")
            continue
        near = difflib.get_close_matches(key, set(model.model_fields) - set(raw), n=1, cutoff=0.8)
        if model is not _Turngate and near and abs(len(key) - len(near[0])) <= 2:
            raise TaskInvalid(f"{path}: {prefix}{key}: unknown key, did you mean {prefix}{near[0]}?")


def _prompt(folder: Path, file: str) -> str:
    """The text of one prompt file, without the newline editors leave at its end."""
    path = folder / file
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise TaskInvalid(f"{path}: missing; metadata.turngate.prompts (default instruction.md) names it")
    try:
        text = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise TaskInvalid(f"{path}: not UTF-8: {error}; save it as UTF-8") from None
    if not text:
        raise TaskInvalid(f"{path}: empty; an agent needs an instruction")
    return text


def _digest(folder: Path) -> str:
    """sha256 over the relative paths and contents of all files, sorted."""
    total = hashlib.sha256()
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()
