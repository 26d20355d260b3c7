"""First program inside a sandbox: opens the door to the gateway, sets limits, becomes the job.

It listens on loopback in the sandbox's own network and hands that listening socket to the runner over an inherited
socket pair, so no relay process runs inside and the sandbox has no other way out. Stand-alone: run by whatever Python
the sandbox has, and it must never import the project, nor at its start a module that is slow to load (json, socket and
signal triple the time until the job runs).
"""

import _signal  # type: ignore[import-not-found]
import _socket
import os
import resource
import sys

DOOR_BACKLOG = 64


def main() -> None:
    """`launcher.py CONTROL_FD PORT GUARD NICENESS LIMITS ARGV…`, LIMITS as `DATA=1,FSIZE=2`; port 0 opens no door."""
    fd, port, with_guard, niceness, limits, *argv = sys.argv[1:]
    control = _socket.socket(fileno=int(fd))
    if port != "0":
        door = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        door.bind(("127.0.0.1", int(port)))
        door.listen(DOOR_BACKLOG)
        handed = door.fileno().to_bytes(4, sys.byteorder)
        control.sendmsg([b"L"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, handed)])
        door.close()
    else:
        control.sendall(b"R")
    if control.recv(1) != b"G":
        sys.exit(111)
    give_way(int(niceness))
    child = guard(control) if with_guard == "1" else None
    if child is not None:
        sys.exit(child)
    control.close()
    for entry in limits.split(","):
        name, _, number = entry.partition("=")
        kind, value = getattr(resource, "RLIMIT_" + name), int(number)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, and a job would inherit that
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot run {argv[0]}: {error}", file=sys.stderr)
        sys.exit(127)


def give_way(niceness: int) -> None:
    """Let whoever is not in this sandbox go first: engine, gateway and trainer, where they share its cores.

    The kernel may group processes by session and weigh whole groups (autogroups): then the group's own niceness counts.
    It lets ordinary users set only ten groups a second, so a sandbox may be left as it is. Niceness 0 changes nothing.
    """
    if niceness == 0:
        return
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    try:
        with open("/proc/self/autogroup", "w") as group:
            group.write(str(niceness))
    except OSError:
        return


def guard(control: _socket.socket) -> "int | None":
    """Stay as the parent of the job: end it and its descendants when the runner closes `control` or dies.

    Returns None in the job itself, its exit status in the guard. Only for sandboxes without a process namespace.
    """
    import ctypes
    import select

    become_subreaper = 36
    ctypes.CDLL(None).prctl(become_subreaper, 1, 0, 0, 0)
    pid = os.fork()
    if pid == 0:
        return None
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    code = None
    while code is None:
        if select.select([control], [], [], 0.05)[0] and not control.recv(1):
            end_all(_signal.SIGTERM)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
    end_all(_signal.SIGKILL)
    return code if code >= 0 else 128 - code


def end_all(first: int) -> None:
    """Signal all descendants with `first`, after two seconds with SIGKILL, until none is left."""
    import time

    deadline = time.monotonic() + 2.0
    sent = first
    while True:
        alive = descendants(os.getpid())
        for pid in alive:
            try:
                os.kill(pid, sent)
            except ProcessLookupError:
                continue
        if sent == _signal.SIGKILL:
            while reap():
                pass
            if not descendants(os.getpid()):
                return
        elif not alive or time.monotonic() > deadline:
            sent = _signal.SIGKILL
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
