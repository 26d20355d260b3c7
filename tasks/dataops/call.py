"""Runs an agent's Python code for check.py: inputs come on stdin as JSON, results go to stdout as JSON.

The code may compute and read the workspace. The kernel refuses it written files and processes (resource limits), an
audit hook other folders, the network and native code. It never sees a wanted result.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import resource
import runpy
import sys
from typing import Any

CPU_S = 3
REFUSED = ("subprocess.", "os.", "socket.", "ctypes.", "shutil.", "pty.", "fcntl.", "signal.", "mmap.", "code.__new__")
BUILT_IN = frozenset({"_posixsubprocess", "_ctypes", "_socket", "_testcapi"})
ALLOWED = frozenset({"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr"})


def guard(readable: tuple[str, ...]) -> None:
    """From now on this process only computes and reads below `readable`."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writing = any(letter in (mode or "r") for letter in "wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            if isinstance(path, int) or writing or not os.path.realpath(os.fsdecode(path)).startswith(readable):
                raise PermissionError(f"{path!r} is out of bounds")
        elif (event == "import" and arguments[0] in BUILT_IN) or (event.startswith(REFUSED) and event not in ALLOWED):
            raise PermissionError(f"{event} is out of bounds")

    for limit, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_CPU, CPU_S)):
        resource.setrlimit(limit, (most, most))
    sys.addaudithook(refuse)


def load(path: str) -> Any:
    """The module at `path`, with its folder importable."""
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    """One request, one answer."""
    ask = json.loads(sys.stdin.buffer.read())
    out = sys.stdout
    here = os.path.realpath(os.getcwd())
    system = {os.path.realpath(folder) for folder in sys.path if folder and os.path.isdir(folder)}
    sys.path.insert(0, os.path.dirname(os.path.join(here, ask["path"])))
    guard(tuple(folder + os.sep for folder in (here, *sorted(system))))
    said = io.StringIO()
    result: Any
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        if "calls" in ask:
            module = load(os.path.join(here, ask["path"]))
            for name, value in ask["set"].items():
                setattr(module, name, value)
            result = [getattr(module, function)(*arguments) for function, arguments in ask["calls"]]
        else:
            runpy.run_path(os.path.join(here, ask["path"]), run_name="__main__")
            result = said.getvalue()
    out.write(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
