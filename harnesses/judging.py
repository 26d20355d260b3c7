"""The process that calls reward functions: one that hangs or crashes costs a rollout, not the run.

One at a time, in that process's main thread (some libraries keep their time limits by signals). Tests of Harbor tasks
never run here: those belong into a sandbox.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from turngate.harnesses.errors import Fault
from turngate.tasks.errors import RewardInvalid
from turngate.tasks.judges import Judge, score
from turngate.tasks.rewards import Reward

START_TIMEOUT_S = 120.0
"""Importing reward functions may take long; a judgement's own limit counts from when the process is ready."""


class Judges:
    """Asks one process; starts it when first needed and anew after a fault. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def ask(self, judge: Judge, answer: str, timeout_s: float) -> Reward:
        """The reward of `answer`; blocks.

        Raises:
            Fault: `verifier_timeout`, `verifier_exit`, `reward_missing` or `reward_invalid`.
        """
        with self._lock:
            pipe = self._started()
            try:
                pipe.send((judge, answer))
                if not pipe.poll(timeout_s):
                    self._stop()
                    raise Fault("verifier_timeout", f"the reward functions gave no result within {timeout_s:g} s")
                found = pipe.recv()
            except (EOFError, OSError) as error:
                self._stop()
                raise Fault("verifier_exit", f"the process of the reward functions died: {error!r}") from error
        if isinstance(found, Reward):
            return found
        raise Fault(*found)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _started(self) -> Connection:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            self._stop()
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_judge_forever, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
            if not self._pipe.poll(START_TIMEOUT_S) or self._pipe.recv() != "ready":
                self._stop()
                raise Fault("verifier_start", f"the reward functions' process was not up in {START_TIMEOUT_S:g} s")
        return self._pipe

    def _stop(self) -> None:
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if process is not None:
            process.kill()
            process.join()
        if pipe is not None:
            pipe.close()


def _judge_forever(pipe: Connection) -> None:
    """Answer until the runner is gone."""
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        pipe.send("ready")
        while True:
            judge, answer = pipe.recv()
            try:
                pipe.send(score(judge, answer))
            except RewardInvalid as error:
                pipe.send((error.cause, error.detail))
