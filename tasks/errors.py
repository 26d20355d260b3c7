"""The exceptions of this package: a task that cannot be loaded, a reward that cannot be believed."""

from __future__ import annotations


class TasksError(ValueError):
    """Base of everything raised on purpose in `turngate.tasks`."""


class TaskInvalid(TasksError):
    """A task directory is wrong; the message names the file, the key and the fix."""


class NoSuchTasks(TaskInvalid):
    """Nothing is where tasks were said to be: wrong usage, where a task that is there but wrong is a failure."""


class RewardInvalid(TasksError):
    """A verifier left no believable reward. `cause` is `reward_missing` or `reward_invalid`."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail
