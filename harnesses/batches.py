"""The synchronous schedule: generate a batch of groups, wait until it is trained and published, generate the next.

It is there to be compared with, and for runs that must never train on an older version's tokens. The gateway's status
knows only groups that have a session, so it must not be asked while rollouts of the batch before run or are about to.
It must never wait for ever: a batch that taught nothing, or a publication that failed, ends its wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from turngate.proxy import wire

PUBLISH_PATIENCE_S = 60.0
"""Longest wait, once a batch is trained, for the version made of it: a publication that failed brings none."""
UNSETTLED = ("open", "ready", "leased")


@dataclass(slots=True)
class Batches:
    """Says when the next batch of `size` groups may begin. `policy` names whose version is waited for; None: the first.

    A runner that was started again does not know what it began before: it waits until nothing is left unsettled, and
    goes on with groups of that time while the gateway has an open one, for then their batch is not trained yet.
    """

    size: int
    policy: str | None = None
    clock: Callable[[], float] = time.monotonic
    _begun: int = field(default=0, init=False)
    _under_way: bool = field(default=False, init=False)
    _before: tuple[int, int] | None = field(default=None, init=False)
    _settled_at_s: float | None = field(default=None, init=False)

    @property
    def open(self) -> bool:
        """Whether the batch that has begun wants more groups."""
        return 0 < self._begun < self.size

    @property
    def under_way(self) -> bool:
        """Whether this runner has begun a batch or gone on with one."""
        return self._under_way

    def begin_group(self) -> None:
        """Count a group of the batch."""
        self._begun += 1

    def may_go_on(self, status: wire.Status) -> bool:
        """Whether groups that an earlier runner began may go on; if so their batch is under way."""
        if status.groups.get("open", 0):
            self._under_way = True
        return self._under_way or self.may_begin(status)

    def may_begin(self, status: wire.Status) -> bool:
        """Whether a batch may begin with this status, asked for while no rollout ran; if so it begins."""
        if any(status.groups.get(state, 0) for state in UNSETTLED):
            self._settled_at_s = None
            return False
        now = (status.groups.get("trained", 0), self._version(status))
        if self._before is not None and now[0] > self._before[0] and now[1] == self._before[1]:
            if self._settled_at_s is None:
                self._settled_at_s = self.clock()
            if self.clock() - self._settled_at_s < PUBLISH_PATIENCE_S:
                return False
        self._before, self._begun, self._settled_at_s, self._under_way = now, 0, None, True
        return True

    def _version(self, status: wire.Status) -> int:
        found = [one for one in status.policies if self.policy in (None, one.policy)]
        return found[0].version if found else 0
