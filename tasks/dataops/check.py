"""Grades a finished workspace: reads checks.json beside this file, writes one number from 0 to 1 to reward.txt.

Copied into the tests/ of every task, so it needs nothing but Python. What an agent left is data: a missing, odd or
hostile file scores 0 and is never an error. Code of the agent runs only in a child process (call.py), which is given
inputs and never the answers.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 1 << 20
CALL_TIMEOUT_S = 20
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?\Z", re.ASCII)
REFUSED = (
    OSError,
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    configparser.Error,
    csv.Error,
)
"""What reading an agent's files may raise; all of it means: wrong."""

Check = dict[str, Any]


def grade(workspace: Path, checks: list[Check]) -> float:
    """0 when a gate fails, else the weighted mean of the other checks."""
    scored = [check for check in checks if not check.get("gate")]
    if any(score(workspace, check) < 1 for check in checks if check.get("gate")):
        return 0.0
    total = sum(check.get("weight", 1) for check in scored)
    return float(sum(check.get("weight", 1) * score(workspace, check) for check in scored) / total)


def score(workspace: Path, check: Check) -> float:
    """0 to 1 for one check."""
    try:
        return float(KINDS[check["kind"]](workspace, check))
    except REFUSED:
        return 0.0


def read(workspace: Path, name: str) -> str:
    """The text of a small regular file inside the workspace; links are refused."""
    path = workspace / name
    top = workspace.resolve()
    if path.is_symlink() or not path.is_file() or path.resolve() != top / name or path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{name} is not a small regular file")
    return path.read_text(encoding="utf-8")


def tidy(text: str) -> list[str]:
    """Lines without spaces at their ends, and without empty lines at the end of the file."""
    lines = [line.rstrip() for line in text.splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def alike(found: Any, wanted: Any) -> bool:
    """Equal as JSON values; numbers within a thousandth of a percent, and never NaN."""
    if isinstance(found, bool) or isinstance(wanted, bool):
        return found is wanted
    if isinstance(found, int | float) and isinstance(wanted, int | float):
        return math.isfinite(found) and math.isclose(found, wanted, rel_tol=1e-5, abs_tol=1e-9)
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[key], wanted[key]) for key in wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def same_word(found: str, wanted: str) -> bool:
    """The same text, or the same number written differently."""
    found = found.strip()
    if NUMBER.match(found) and NUMBER.match(wanted):
        return alike(float(found), float(wanted))
    return found == wanted


def number(workspace: Path, check: Check) -> float:
    """One number and nothing else; half where a few words stand beside the only number."""
    words = read(workspace, check["path"]).split()
    numbers = [word for word in words if NUMBER.match(word)]
    if len(numbers) != 1 or len(words) > 6 or not same_word(numbers[0], check["value"]):
        return 0.0
    return 1.0 if len(words) == 1 else 0.5


def lines(workspace: Path, check: Check) -> float:
    """The wanted lines in their order; half for one of the `near` misses that the task names."""
    found = tidy(read(workspace, check["path"]))
    if found == check["lines"]:
        return 1.0
    return 0.5 if found in check.get("near", []) else 0.0


def table(workspace: Path, check: Check) -> float:
    """The wanted rows of a CSV, numbers compared as numbers; half for a near miss."""
    found = [row for row in csv.reader(io.StringIO(read(workspace, check["path"]))) if row]

    def equal(wanted: list[list[str]]) -> bool:
        pairs = zip(found, wanted, strict=False)
        return len(found) == len(wanted) and all(
            len(a) == len(b) and all(map(same_word, a, b)) for a, b in pairs
        )  # fmt: skip

    if equal(check["rows"]):
        return 1.0
    return 0.5 if any(equal(near) for near in check.get("near", [])) else 0.0


def pairs(workspace: Path, check: Check) -> float:
    """`key=value` lines: the share of keys that are right, if at least two are and no key is unknown."""
    found = {}
    for line in tidy(read(workspace, check["path"])):
        key, _, value = line.partition("=")
        found[key.strip()] = value.strip()
    wanted = check["pairs"]
    right = sum(key in found and same_word(found[key], value) for key, value in wanted.items())
    return right / len(wanted) if right >= 2 and found.keys() <= wanted.keys() else 0.0


def settings(workspace: Path, check: Check) -> float:
    """A whole configuration file means what it should: `env`, `ini` or `json`."""
    text = read(workspace, check["path"])
    found: Any
    if check["format"] == "json":
        found = json.loads(text, parse_constant=_no_constant)
    elif check["format"] == "ini":
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        found = {section: dict(parser[section]) for section in parser.sections()}
    else:
        entries = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
        found = dict(line.split("=", 1) for line in entries)
        if len(found) != len(entries):
            return 0.0
    return float(alike(found, check["value"]))


def json_lines(workspace: Path, check: Check) -> float:
    """One JSON value a line, in order."""
    found = [json.loads(line, parse_constant=_no_constant) for line in tidy(read(workspace, check["path"])) if line]
    return float(alike(found, check["values"]))


def same(workspace: Path, check: Check) -> float:
    """The file has exactly the content with this sha256."""
    text = read(workspace, check["path"])
    return float(hashlib.sha256(text.encode()).hexdigest() == check["sha256"])


def absent(workspace: Path, check: Check) -> float:
    """Nothing of that name is left."""
    path = workspace / check["path"]
    return float(not path.exists() and not path.is_symlink())


def program(workspace: Path, check: Check) -> float:
    """A Python file is the wanted program, whatever its comments and layout."""
    return float(ast.dump(ast.parse(read(workspace, check["path"]))) == ast.dump(ast.parse(check["source"])))


def defines(workspace: Path, check: Check) -> float:
    """A Python file defines these functions, and none of those."""
    tree = ast.parse(read(workspace, check["path"]))
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return float(found >= set(check["present"]) and not found & set(check["missing"]))


def calls(workspace: Path, check: Check) -> float:
    """Functions of a module give the wanted results; `set` replaces names of the module before."""
    read(workspace, check["path"])
    cases = check["cases"]
    calls_ = [[function, arguments] for function, arguments, _ in cases]
    found = child(workspace, {"path": check["path"], "calls": calls_, "set": check.get("set", {})})
    return float(alike(found, [wanted for _, _, wanted in cases]))


def prints(workspace: Path, check: Check) -> float:
    """A Python program prints the wanted lines."""
    read(workspace, check["path"])
    found = child(workspace, {"path": check["path"]})
    return float(isinstance(found, str) and tidy(found) == check["lines"])


def child(workspace: Path, ask: dict[str, Any]) -> Any:
    """What call.py makes of `ask`; it ends with its whole process group, also when it hangs."""
    argv = [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("call.py"))]
    env = {"PATH": os.defpath, "LANG": "C.UTF-8"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=workspace, env=env, start_new_session=True
    )
    try:
        out, _ = process.communicate(json.dumps(ask).encode(), timeout=CALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return json.loads(out[:MAX_FILE_BYTES], parse_constant=_no_constant) if process.returncode == 0 else None


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


KINDS: dict[str, Callable[[Path, Check], float]] = {
    "number": number,
    "lines": lines,
    "table": table,
    "pairs": pairs,
    "settings": settings,
    "json_lines": json_lines,
    "same": same,
    "absent": absent,
    "program": program,
    "defines": defines,
    "calls": calls,
    "prints": prints,
}


def main() -> int:
    """Grade the current folder."""
    here = Path(__file__).resolve().parent
    reward = grade(Path.cwd(), json.loads((here / "checks.json").read_text(encoding="utf-8")))
    folder = Path(os.environ.get("TURNGATE_REWARDS", "/logs/verifier"))
    (folder / "reward.txt").write_text(f"{reward:.3f}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
