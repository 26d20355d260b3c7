"""`turngate train`: settings in, a run of optimizer steps out, resumed from the newest complete checkpoint.

Wires the parts together and owns the process: signals, exit status, environment. Heavy imports happen inside the
command, so `--help` and usage errors answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from turngate.harnesses.setting_files import read_mapping
from turngate.proxy.arguments import Parser
from turngate.proxy.client import GatewayClient, GatewayError
from turngate.trainer.errors import NeverFinite, SettingsError, TrainerError
from turngate.trainer.files import output_folder
from turngate.trainer.restarts import IN_VAIN
from turngate.trainer.settings import TrainSettings
from turngate.trainer.tracking import track_in

log = logging.getLogger("turngate.trainer")

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

EPILOG = """\
examples:
  turngate train --model smollm2-135m --admin-key-file runs/try/store/admin.key --output runs/try --steps 20
  turngate train --config examples/demo.yaml --model smollm2-135m --admin-key-file runs/try/store/admin.key

It waits for groups, makes its steps and ends; started again on the same output it goes on from the newest complete
checkpoint. Ctrl-C ends it after the step in progress, with a checkpoint; a second one at once.
exit status: 0 all steps done, 1 failed, 2 wrong usage, 78 learns nothing with these settings,
130 interrupted
"""


def train_command(argv: Sequence[str]) -> int:
    """Run `turngate train ARGV`; returns the exit status, see `EPILOG`."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = load_settings(options.config, _overrides(options))
        settings.admin_key()
        output_folder(settings.output, "output")
    except SettingsError as error:
        print(f"turngate train: {error}", file=sys.stderr)
        return USAGE
    stop = threading.Event()
    _stop_on_signals(stop)
    try:
        return train(settings, stop)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (TrainerError, GatewayError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return IN_VAIN if isinstance(error, NeverFinite) else FAILED


def load_settings(config: Path | None, overrides: dict[str, Any]) -> TrainSettings:
    """Settings from a YAML file (its `train:` section, or all of it) and overrides on top.

    Raises:
        SettingsError: the file cannot be read, or a value or key is wrong; says which.
    """
    values = read_config(config, "train")
    try:
        return TrainSettings.model_validate(values | overrides)
    except ValidationError as error:
        raise SettingsError(settings_words(error)) from error


def settings_words(error: ValidationError) -> str:
    """Every wrong setting and what is wrong with it."""
    named = [(".".join(map(str, one["loc"])) or "settings", one["msg"]) for one in error.errors()]
    return "; ".join(f"{name}: {message.removeprefix('Value error, ')}" for name, message in named)


def read_config(config: Path | None, section: str) -> dict[str, Any]:
    """The settings in a YAML file: its `section`, or all of it; none without a file.

    Raises:
        SettingsError: the file cannot be read.
    """
    try:
        return {} if config is None else read_mapping(config, section)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def train(settings: TrainSettings, stop: threading.Event) -> int:
    """Train until `settings.steps` steps are done or `stop` is set.

    Returns:
        `DONE`, or `INTERRUPTED` when it was stopped before the last step.

    Raises:
        TrainerError: the gateway was lost, or refused, or TRL is not the pinned version.
    """
    training_environment(settings.output)
    import torch

    from turngate.proxy import wire
    from turngate.trainer import checkpoint, trl_names, trl_seam
    from turngate.trainer.lease_source import LeaseSource, LeaseTerms
    from turngate.trainer.models import resolve_model
    from turngate.trainer.run import Run

    trl_names.check_version()
    settings = settings.model_copy(update={"model": str(resolve_model(settings.model))})
    prepare_torch(settings.threads, settings.device)
    found = checkpoint.newest_complete(settings.output / "checkpoints") if settings.resume else None
    state = found[1] if found else checkpoint.RunState(0, 0, settings.policy)
    if state.step >= settings.steps:
        log.info("step %d of %d is done already; raise `steps` to train on", state.step, settings.steps)
        return DONE
    with GatewayClient(settings.gateway, settings.admin_key()) as client:
        terms = LeaseTerms(
            policy=settings.policy,
            ahead=max(settings.groups_per_step * max(settings.prefetch_steps, settings.schedule == "sync"), 1),
            ttl_s=settings.lease_ttl_s,
            patience_s=settings.gateway_patience_s,
            max_row_tokens=settings.token_budget,
            credit=settings.credit,
        )
        source = LeaseSource(client, terms, lineage=dict(state.lineage), step=state.step)
        run = Run(settings, client, source, state)
        trainer = trl_seam.GatewayTrainer(settings, run, source, stop)
        log.info(
            "tree attention: %s; passed over: %s", trainer.attention.name, dict(trainer.attention_refused) or "none"
        )
        if trainer.accelerator.is_main_process:
            resume = wire.Resume(policy=settings.policy, step=state.step)
            resumed = source.patiently("resuming", lambda: _unless_stopped(stop, client).resume(resume))
            if found:
                run.declare_durable(found[0], state.step)
            log.info(
                "from step %d of %d; %d groups returned to be leased again",
                state.step,
                settings.steps,
                resumed.returned_groups,
            )
        try:
            trainer.train(resume_from_checkpoint=str(found[0]) if found else None)
        finally:
            run.close()
        if trainer.accelerator.num_processes > 1:  # one that leaves first would abort those that still speak to it
            trainer.accelerator.wait_for_everyone()
            torch.distributed.destroy_process_group()
    return DONE if trainer.state.global_step >= settings.steps or not _interrupted(stop) else INTERRUPTED


def _unless_stopped(stop: threading.Event, client: GatewayClient) -> GatewayClient:
    """`client`, asked again and again while the gateway is away: nothing has begun that could be finished first."""
    if stop.is_set():
        raise KeyboardInterrupt
    return client


def _interrupted(stop: threading.Event) -> bool:
    return getattr(stop, "by_signal", False)


def training_environment(folder: Path) -> None:
    """Defaults that a training process of the run in `folder` wants; a user's own values win."""
    track_in(folder)
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def prepare_torch(asked: int | None, device: str) -> None:
    """Let torch's CPU work have `asked` threads; by default 1 where a GPU computes, else as many as torch decides.

    What is left for the CPU then is small, and threads that share it wait for one another beside many agents. No
    attention is computed by cuDNN, whose backward may give NaN (`attention.SDPA_KERNELS`).
    """
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    if asked is not None or (device != "cpu" and torch.cuda.is_available()):
        torch.set_num_threads(asked or 1)


def _stop_on_signals(stop: threading.Event) -> None:
    """The first SIGTERM or SIGINT ends training after the step in progress; a second one at once."""

    def handle(number: int, _: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        log.info("%s: finishing the step in progress", signal.Signals(number).name)
        stop.by_signal = True  # type: ignore[attr-defined]
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate train",
        description="Train a LoRA adapter on whole groups leased from a gateway; publish a version each step. Every "
        "setting may also stand in the file's `train:` section; flags win.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the settings or a `train:` section")
    for name, field in TrainSettings.model_fields.items():
        text = f"{field.description}{default_words(field)}".replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="VALUE", help=text)
    return parser


def default_words(field: FieldInfo) -> str:
    """A setting's default as it would be typed; nothing where there is none."""
    if field.is_required() or field.default is None:
        return ""
    value = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    return f" (default: {value})"


def _overrides(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(options).items() if name != "config" and value is not None}
    for name in ("lora_targets", "report_to"):
        if name in given:
            given[name] = [part for part in given[name].split(",") if part]
    return given
