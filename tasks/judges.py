"""Rewards from Python functions with TRL's signature, for tasks that are rows of a dataset.

A judge is a value that can be sent to another process; `score` is what that process does with it. A function sees the
row's columns by name, as in TRL: `function(prompts=[…], completions=[…], **columns) -> [number or None]`.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngate.tasks.errors import RewardInvalid, TaskInvalid
from turngate.tasks.rewards import Reward

MESSAGES_ONLY = "trl.rewards."
"""Functions of TRL itself take conversations only, whatever the dataset's prompts look like."""


@dataclass(frozen=True, slots=True)
class Judge:
    """`functions` by import name, `weights` one each, the row's `prompt` as it stands there, its other `columns`."""

    functions: tuple[str, ...]
    weights: tuple[float, ...]
    prompt: Any
    columns: Mapping[str, Any]


def find_function(name: str) -> Callable[..., Any]:
    """The function called `package.module.name`, `package.module:name` or `path/to/file.py:name`.

    Raises:
        TaskInvalid: there is none; the message says what was tried.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        module_name, _, attribute = name.rpartition(".")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        found = getattr(module, attribute)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise TaskInvalid(
            f"dataset.rewards: {name!r} cannot be imported ({error}); write package.module.function, or "
            "path/to/file.py:function"
        ) from error
    if not callable(found):
        raise TaskInvalid(f"dataset.rewards: {name!r} is not a function")
    return found  # type: ignore[no-any-return]


def score(judge: Judge, answer: str) -> Reward:
    """The weighted sum of what the functions say of `answer`; each one's number is a part. None counts for nothing.

    Raises:
        RewardInvalid: a function failed or did not return one finite number, or all returned None.
    """
    parts: dict[str, float] = {}
    total = 0.0
    for name, weight in zip(judge.functions, judge.weights, strict=True):
        value = _call(name, judge, answer)
        if value is not None:
            parts[name.rpartition(":" if ":" in name else ".")[2]] = value
            total += weight * value
    if not parts:
        raise RewardInvalid("reward_missing", "every reward function returned None")
    return Reward(total, parts)


def _call(name: str, judge: Judge, answer: str) -> float | None:
    conversational = not isinstance(judge.prompt, str) or name.startswith(MESSAGES_ONLY)
    completion = [{"role": "assistant", "content": answer}] if conversational else answer
    prompt = judge.prompt
    if conversational and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    columns = {key: [value] for key, value in judge.columns.items()}
    try:
        found = find_function(name)(prompts=[prompt], completions=[completion], **columns)
        if inspect.isawaitable(found):
            found = asyncio.run(_await(found))
        (value,) = found
    except Exception as error:
        raise RewardInvalid("reward_invalid", f"{name} failed: {type(error).__name__}: {error}") from error
    if value is None:
        return None
    if isinstance(value, str) or not math.isfinite(float(value)):
        raise RewardInvalid("reward_invalid", f"{name} returned {value!r}, wanted a finite number or None")
    return float(value)


async def _await(found: Any) -> Any:
    return await found
