"""Reading a verifier's reward: one finite number within the task's declared range, or nothing.

Read from outside the sandbox, and never through a link: a file that is not plainly a number makes the rollout
unscorable instead of teaching the policy something false.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngate.tasks.errors import RewardInvalid

MAX_FILE_BYTES = 1 << 16
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Reward:
    """`value` lies in the declared range; `parts` are further named numbers of reward.json."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


def read_reward(folder: Path, low: float, high: float) -> Reward:
    """The reward in `folder`, from reward.txt or else reward.json, as Harbor's verifiers write it.

    Raises:
        RewardInvalid: neither is there, or what is there is not a finite number within `low` to `high`.
    """
    text = _read(folder / "reward.txt")
    if text is not None:
        return Reward(parse_number(text.strip(), low, high, "reward.txt"))
    text = _read(folder / "reward.json")
    if text is None:
        raise RewardInvalid("reward_missing", "the verifier wrote neither reward.txt nor reward.json")
    return _from_json(text, low, high)


def parse_number(text: str, low: float, high: float, source: str) -> float:
    """`text` as a finite number within `low` to `high`.

    Raises:
        RewardInvalid: it is anything else.
    """
    if not NUMBER.match(text):
        raise RewardInvalid("reward_invalid", f"{source} holds {text[:80]!r}, wanted one number")
    value = float(text)
    if not math.isfinite(value) or not low <= value <= high:
        raise RewardInvalid("reward_invalid", f"{source} holds {text[:80]}, wanted a number from {low:g} to {high:g}")
    return value


def _from_json(text: str, low: float, high: float) -> Reward:
    """`{"reward": x, …}`, or one number under any name."""
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise RewardInvalid("reward_invalid", f"reward.json is not JSON: {error}") from None
    if not isinstance(found, dict) or not found:
        raise RewardInvalid("reward_invalid", "reward.json must be an object of numbers")
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in found.values()):
        raise RewardInvalid("reward_invalid", "reward.json holds something that is not a finite number")
    key = "reward" if "reward" in found else next(iter(found))
    if key != "reward" and len(found) > 1:
        raise RewardInvalid("reward_invalid", "reward.json has several numbers and none is called 'reward'")
    value = parse_number(repr(found[key]), low, high, f"reward.json[{key}]")
    return Reward(value, {name: float(number) for name, number in found.items() if name != key})


def _read(path: Path) -> str | None:
    """The text of a small regular file, None when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RewardInvalid("reward_invalid", f"{path.name} cannot be read: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_FILE_BYTES:
            raise RewardInvalid("reward_invalid", f"{path.name} is not a small regular file")
        return os.read(fd, MAX_FILE_BYTES).decode("utf-8", "replace")
    finally:
        os.close(fd)
