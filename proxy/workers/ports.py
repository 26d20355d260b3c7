"""The workers' ports: kept with the store, because agents' base URLs name them, and held open by the control process.

A connection made while a worker is being restarted waits in the listener's queue instead of being refused.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from turngate.proxy.sockets import BACKLOG, listen
from turngate.proxy.store.layout import StoreFolder

log = logging.getLogger("turngate.workers")

FREED_WITHIN_S = 5.0
"""How long a port kept with the store may still belong to a worker of a gateway that was killed just now."""


def worker_listeners(
    folder: StoreFolder, host: str, main_port: int, workers: int, *, sleep: Callable[[float], None] = time.sleep
) -> list[socket.socket]:
    """A listening socket for each worker: its port of last time, else the one after the main port, else any free one.

    Raises:
        OSError: the address cannot be listened on at all.
    """
    kept = {int(k): int(port) for k, port in folder.facts().get("worker_ports", {}).items()}
    listeners = []
    for worker in range(workers):
        listener = _again(host, kept[worker], sleep) if worker in kept else None
        if worker in kept and listener is None:
            log.warning("worker_port_taken", extra={"worker": worker, "port": kept[worker]})
        if listener is None:
            listener = _next_or_any(host, main_port + 1 + worker if main_port else 0)
        listener.listen(BACKLOG)
        listeners.append(listener)
    now = {str(worker): listener.getsockname()[1] for worker, listener in enumerate(listeners)}
    folder.note(worker_ports={**{str(k): port for k, port in kept.items()}, **now})
    return listeners


def _again(host: str, port: int, sleep: Callable[[float], None]) -> socket.socket | None:
    for _ in range(round(FREED_WITHIN_S / 0.1)):
        try:
            return listen(host, port)
        except OSError:
            sleep(0.1)
    return None


def _next_or_any(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port if port <= 65535 else 0)
    except OSError:
        return listen(host, 0)
