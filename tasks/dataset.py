"""Rows of a `datasets` dataset as tasks: a prompt column, and Python functions that judge the answer.

From a local file or folder (Parquet, JSON, CSV, or what `save_to_disk` wrote), or from the hub as `hf:owner/name`. The
package `datasets` is imported only when one is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from turngate.tasks.errors import TaskInvalid
from turngate.tasks.harbor import Task
from turngate.tasks.judges import Judge, find_function

HUB = "hf:"
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
ANY_REWARD = 1e9


class DatasetOptions(BaseModel):
    """How rows become tasks; used only where `tasks` names a dataset."""

    model_config = ConfigDict(extra="forbid")

    split: str = Field("train", description="split of the dataset")
    prompt_column: str = Field("prompt", description="column with the prompt: a text, or a list of messages")
    limit: int | None = Field(None, ge=1, description="take so many rows from the start; default: all")
    rewards: list[str] = Field(
        ["trl.rewards.accuracy_reward"],
        min_length=1,
        description="functions with TRL's signature: package.module.function or file.py:function",
    )
    reward_weights: list[float] | None = Field(None, description="one weight a function; default: 1 each")
    reward_timeout_s: float = Field(60.0, gt=0, description="longest time for judging one answer")


def is_dataset(where: str) -> bool:
    """Whether `where` names a dataset rather than Harbor tasks."""
    path = Path(where)
    if where.startswith(HUB) or (path.is_file() and path.suffix in FORMATS):
        return True
    return path.is_dir() and not any(path.rglob("task.toml")) and bool(_saved(path) or _files(path))


def load_rows(where: str, options: DatasetOptions) -> list[Task]:
    """One task a row.

    Raises:
        TaskInvalid: the dataset, a column, a prompt or a reward function is wrong; the message says which.
    """
    weights = options.reward_weights or [1.0] * len(options.rewards)
    if len(weights) != len(options.rewards):
        raise TaskInvalid(f"dataset.reward_weights: {len(weights)} weights for {len(options.rewards)} functions")
    for name in options.rewards:
        find_function(name)
    rows = _load(where, options)
    if options.prompt_column not in rows.column_names:
        raise TaskInvalid(
            f"{where}: no column {options.prompt_column!r}; set dataset.prompt_column to one of: "
            f"{', '.join(rows.column_names)}"
        )
    size = len(rows) if options.limit is None else min(options.limit, len(rows))
    if size == 0:
        raise TaskInvalid(f"{where}: split {options.split} has no rows")
    width = len(str(size - 1))
    stem = Path(where.removeprefix(HUB)).stem
    return [
        _task(where, f"{stem}-{number:0{width}}", dict(rows[number]), options, tuple(weights)) for number in range(size)
    ]


def _load(where: str, options: DatasetOptions) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise TaskInvalid(f"{where}: needs the package 'datasets': pip install 'turngate[train]'") from error
    path = Path(where)
    try:
        if where.startswith(HUB):
            return datasets.load_dataset(where.removeprefix(HUB), split=options.split)
        if _saved(path):
            loaded = datasets.load_from_disk(where)
            return loaded[options.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        files = [path] if path.is_file() else _files(path)
        (form,) = {FORMATS[file.suffix] for file in files}
        if empty := [str(file) for file in files if not file.stat().st_size]:
            raise ValueError(f"empty file: {', '.join(empty)}")
        named = {options.split: [str(file) for file in files]}
        return datasets.load_dataset(form, data_files=named, split=options.split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        error = error.__cause__ or error
        raise TaskInvalid(
            f"{where}: cannot be read as a dataset, split {options.split!r} ({type(error).__name__}: {error})"
        ) from error


def _saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.suffix in FORMATS)


def _task(where: str, name: str, row: dict[str, Any], options: DatasetOptions, weights: tuple[float, ...]) -> Task:
    prompt = row.pop(options.prompt_column)
    system, prompts = _messages(f"{where}: {name}", prompt)
    content = json.dumps([prompt, row, options.rewards], sort_keys=True, default=str)
    return Task(
        name=name,
        folder=Path(where),
        prompts=prompts,
        workdir=PurePosixPath("/workspace"),
        agent_timeout_s=None,
        verifier_timeout_s=options.reward_timeout_s,
        verifier_env={},
        reward_low=-ANY_REWARD,
        reward_high=ANY_REWARD,
        answer_file=None,
        digest=hashlib.sha256(content.encode()).hexdigest(),
        system=system,
        judge=Judge(tuple(options.rewards), weights, prompt, row),
    )


def _messages(where: str, prompt: Any) -> tuple[str | None, tuple[str, ...]]:
    """The system message, if any, and the user's messages."""
    if isinstance(prompt, str) and prompt.strip():
        return None, (prompt,)
    found: Sequence[Mapping[str, Any]] = prompt if isinstance(prompt, list) else []
    system = None
    if found and found[0].get("role") == "system":
        system, found = str(found[0].get("content")), found[1:]
    if not found or any(one.get("role") != "user" or not isinstance(one.get("content"), str) for one in found):
        raise TaskInvalid(
            f"{where}: a prompt is a text, or a list of user messages behind at most one system message; "
            f"got {str(prompt)[:120]!r}"
        )
    return system, tuple(str(one["content"]) for one in found)
