"""When the gateway says no: which refusals no later rollout can escape, and how many of one kind are enough.

Without an end a wrong setting goes round for ever: a rollout is refused in a millisecond, and so is the next. It must
never end a run of which some sessions work: one bad task among good ones costs its own rollouts only.
"""

from __future__ import annotations

import re

LOCKED_OUT = ("status 401", "status 403")
"""Details of a refusal that no later rollout can escape: the key is wrong."""
ENOUGH = 20
"""So many refusals with the same words in a row, and nothing else between them, end the run."""
ENOUGH_TASKS = 3
"""They must be of so many tasks, where there are so many."""

_CHANGING = re.compile(r"[0-9a-f-]{8,}|\d+")


class Refusals:
    """Counts them. `tasks`: how many the run has; `group_size`: rollouts of one task that are refused together."""

    def __init__(self, tasks: int, group_size: int) -> None:
        self._enough = max(ENOUGH, 2 * group_size)
        self._enough_tasks = min(ENOUGH_TASKS, tasks)
        self._kind = ""
        self._count = 0
        self._tasks: set[str] = set()
        self.locked_out = ""
        self.hopeless = ""

    def refused(self, detail: str, task: str = "") -> None:
        """One more: `detail` is `status N: words`. Without a `task` it was no rollout that was refused."""
        if detail.startswith(LOCKED_OUT):
            self.locked_out = detail
        kind = detail[:10] + _CHANGING.sub("#", detail[10:])  # ids in the words differ from rollout to rollout
        if kind != self._kind:
            self.reset()
        self._kind = kind
        self._count += 1
        self._tasks.add(task)
        if self._count >= self._enough and ("" in self._tasks or len(self._tasks) >= self._enough_tasks):
            self.hopeless = f"the gateway refused {self._count} times in a row, always the same: {detail}"

    def reset(self) -> None:
        """Something went well, or failed in another way."""
        self._kind, self._count = "", 0
        self._tasks.clear()
