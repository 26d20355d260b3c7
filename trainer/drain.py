"""A run that stands still: the runner has done all it was told to, and the trainer waits for groups that never come.

Pure: times are passed in. It must never end a run whose trainer still makes steps.
"""

from __future__ import annotations

from turngate.trainer.children import ChildError


class Drain:
    """Notices that the runner is done but the trainer waits for groups that will never come."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._steps = -1
        self._since_s = 0.0

    def check(self, steps: int, now_s: float, *, runner_done: bool) -> None:
        """Raise ChildError when the runner ended well and no step was made for the patience since."""
        if not runner_done or steps != self._steps:
            self._steps, self._since_s = steps, now_s
        elif now_s - self._since_s > self._patience_s:
            raise ChildError(
                f"the runner has done all its rollouts, but the trainer stands at {steps} steps for "
                f"{self._patience_s:.0f} s: give the run more groups (those without variance do not count)"
            )
