"""First program inside a sandbox: opens the door to the gateway, sets limits, becomes the job.

It listens on loopback in the sandbox's own network and hands that listening socket to the runner over an inherited
socket pair, so no relay process runs inside and the sandbox has no other way out. Stand-alone: standard library only,
run by whatever Python the sandbox has, and it must never import the project.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import time


def main() -> None:
    """`launcher.py CONTROL_FD SPEC` where SPEC is JSON `{"port", "limits", "argv", "guard"}`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    spec = json.loads(sys.argv[2])
    if spec["port"]:
        door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        door.bind(("127.0.0.1", spec["port"]))
        door.listen(64)
        socket.send_fds(control, [b"L"], [door.fileno()])
        door.close()
    else:
        control.sendall(b"R")
    if control.recv(1) != b"G":
        sys.exit(111)
    child = guard(control) if spec["guard"] else None
    if child is not None:
        sys.exit(child)
    control.close()
    for name, value in spec["limits"].items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a job would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(spec["argv"][0], spec["argv"])
    except OSError as error:
        print(f"cannot run {spec['argv'][0]}: {error}", file=sys.stderr)
        sys.exit(127)


def guard(control: socket.socket) -> "int | None":
    """Stay as the parent of the job: end it and its descendants when the runner closes `control` or dies.

    Returns None in the job itself, its exit status in the guard. Only for sandboxes without a process namespace.
    """
    import ctypes

    become_subreaper = 36
    ctypes.CDLL(None).prctl(become_subreaper, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        return None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = None
    while code is None:
        if select.select([control], [], [], 0.05)[0] and not control.recv(1):
            end_all(signal.SIGTERM)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
    end_all(signal.SIGKILL)
    return code if code >= 0 else 128 - code


def end_all(first: int) -> None:
    """Signal all descendants with `first`, after two seconds with SIGKILL, until none is left."""
    deadline = time.monotonic() + 2.0
    sent = first
    while True:
        alive = descendants(os.getpid())
        for pid in alive:
            try:
                os.kill(pid, sent)
            except ProcessLookupError:
                continue
        if sent == signal.SIGKILL:
            while reap():
                pass
            if not descendants(os.getpid()):
                return
        elif not alive or time.monotonic() > deadline:
            sent = signal.SIGKILL
        time.sleep(0.02)


def reap() -> bool:
    """Collect one dead child; whether there was one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def descendants(root: int) -> "list[int]":
    """Process ids below `root`."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as handle:
                    parents[int(name)] = int(handle.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, frontier = [], [root]
    while frontier:
        above = frontier.pop()
        below = [pid for pid, parent in parents.items() if parent == above]
        found += below
        frontier += below
    return found


if __name__ == "__main__":
    main()
