"""Trackio, embedded: the numbers of a run in a project of its own, a SQLite file in the run's folder.

`metrics.jsonl` and `evals.jsonl` are the record; this is for those who want curves, and needs no server, account or
network. Whatever fails here is said once and switches it off; it must never end a run, nor hold one up.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger(__name__)

Tracker = Literal[
    "trackio", "wandb", "tensorboard", "mlflow", "comet_ml", "swanlab", "clearml", "dvclive", "neptune", "codecarbon"
]
"""What metrics can be reported to: trackio by this module, the others by the Trainer."""

EMBEDDED: Tracker = "trackio"
FOLDER_VARIABLE = "TRACKIO_DIR"

TRAIN, SFT, EVALUATION, BASE = "train", "sft", "evaluation", "evaluation-base"
"""The runs of a project: the steps, the fine-tuning's, the evaluations of the policy, the one of the base."""

NOT_NUMBERS = frozenset({"step", "time"})


def others(report_to: Sequence[str]) -> list[str] | str:
    """The trackers that the Trainer reports to by itself, as it wants them named."""
    return [name for name in report_to if name != EMBEDDED] or "none"


def kept_in(folder: Path) -> Path:
    """Where trackio keeps the run in `folder`: in it, or where the environment says."""
    return Path(os.environ.get(FOLDER_VARIABLE) or folder.absolute() / EMBEDDED)


def track_in(folder: Path) -> None:
    """Have trackio write there; to be called before anything imports it, and TRL does."""
    os.environ[FOLDER_VARIABLE] = str(kept_in(folder))


def is_installed() -> bool:
    """Whether trackio can be imported."""
    return importlib.util.find_spec(EMBEDDED) is not None


def how_to_look(folder: Path) -> str:
    """The command that shows the curves of the run in `folder`, or why there are none."""
    if not is_installed():
        return "none, trackio is not installed (pip install trackio); metrics.jsonl has the numbers"
    program = Path(sys.executable).with_name(EMBEDDED)
    words = [str(program) if program.exists() else EMBEDDED, "show", "--project", folder.absolute().name]
    return f"{FOLDER_VARIABLE}={shlex.quote(str(kept_in(folder)))} {shlex.join(words)}"


def numbers(record: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The finite numbers of a record under `prefix`; of a dictionary in it, such as `settled`, each entry."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif name not in NOT_NUMBERS and isinstance(value, int | float) and math.isfinite(value):
            found[prefix + name] = value
    return found


class Tracking:
    """A trackio project. One of its runs is open at a time: made by its first numbers, or gone on with.

    Args:
        folder: the run's folder; its name is the project's.
        config: what is shown with the runs; nothing secret.
        wanted: whether to track at all.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], *, wanted: bool) -> None:
        self._folder = folder
        self._config = dict(config)
        self._name = ""
        self._run: Any = None
        self._on = wanted

    def log(self, name: str, found: Mapping[str, float], step: int) -> None:
        """Hand over numbers for the project's run `name`; they are written within a second."""
        if not self._on or not found:
            return
        with self._never_failing("written to"):
            if self._run is None or name != self._name:
                self.close()
                self._on = self._can()
                self._run, self._name = self._open(name) if self._on else None, name
            if self._run is not None:
                self._run.log(dict(found), step=step)

    def close(self) -> None:
        """Write what is left. Numbers after this open their run again."""
        with self._never_failing("closed"):
            if self._run is not None:
                trackio: Any = importlib.import_module(EMBEDDED)
                run, self._run = self._run, None
                with _quietly():
                    trackio.finish() if trackio.context_vars.current_run.get() is run else run.finish()

    def _can(self) -> bool:
        """Whether trackio is there and writes where this run wants it; says so where not."""
        if not is_installed():
            log.warning("trackio is not installed, so no curves are kept; metrics.jsonl has every number")
            return False
        kept, imported = kept_in(self._folder), sys.modules.get("trackio.utils")
        if imported is None:
            track_in(self._folder)
        elif kept != imported.TRACKIO_DIR:
            log.warning("trackio writes to %s since it was imported, not to %s: not used", imported.TRACKIO_DIR, kept)
            return False
        kept.mkdir(parents=True, exist_ok=True)
        return True

    def _open(self, name: str) -> Any:
        """Begin the run or go on with it. Only documented names are kept, so what trackio sees of machines is off."""
        import trackio

        with _quietly(), _nobody_asked():
            run = trackio.init(
                project=self._folder.absolute().name,
                name=name,
                config=self._config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        log.info("curves: run %s of the trackio project in %s", name, os.environ[FOLDER_VARIABLE])
        return run

    @contextlib.contextmanager
    def _never_failing(self, done: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on without curves
            log.warning("trackio cannot be %s and is not used any more: %s: %s", done, type(error).__name__, error)
            self._on, self._run = False, None


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without trackio's words on standard output, which is a command's own."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _nobody_asked() -> Iterator[None]:
    """Keep trackio from asking the hub whose token lies on this machine; it would only note the name."""
    run: Any = importlib.import_module("trackio.run")
    original, run._get_default_namespace = run._get_default_namespace, lambda: None
    try:
        yield
    finally:
        run._get_default_namespace = original
