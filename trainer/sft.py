"""`turngate sft`: a LoRA adapter from demonstrations, or from a policy's own successes, on exactly the store's tokens.

The adapter is what `turngate train --adapter` and `warm_start:` of a launch file go on from. Heavy imports happen
inside the command.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turngate.proxy.arguments import Parser
from turngate.trainer.errors import NoStore, SettingsError, TrainerError
from turngate.trainer.files import output_folder, write_json
from turngate.trainer.sft_settings import SftSettings
from turngate.trainer.train import default_words, prepare_torch, read_config, settings_words, training_environment

log = logging.getLogger("turngate.sft")

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

EPILOG = """\
examples:
  turngate sft runs/demos --where 'demonstration and reward >= 1' --model qwen-coder-0.5b --out runs/sft
  turngate sft runs/rl --where 'reward >= 1 and version > 3' --model qwen-coder-0.5b --out runs/own
  turngate train --adapter runs/sft/adapter ...          RL that goes on from it

It writes OUT/adapter (PEFT), OUT/rows.jsonl (what was learnt), OUT/metrics.jsonl (a line a step), and prints a summary
as JSON, also in OUT/sft.json: `hardest` are the tokens that are still the most improbable where the rows have them, and
`alarms` says when one of them will hardly ever be written.
exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted
"""


def sft_command(argv: Sequence[str]) -> int:
    """Run `turngate sft ARGV`; returns the exit status."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        settings = _settings(options)
        if (settings.output / "adapter").exists():
            raise SettingsError(f"{settings.output / 'adapter'} is there already; choose another --out")
        output_folder(settings.output, "--out")
    except SettingsError as error:
        print(f"turngate sft: {error}", file=sys.stderr)
        return USAGE
    try:
        print(json.dumps(learn(settings)))
    except KeyboardInterrupt:
        return INTERRUPTED
    except NoStore as error:
        print(f"turngate sft: {error}", file=sys.stderr)
        return USAGE
    except TrainerError as error:
        print(f"turngate sft: {error}", file=sys.stderr)
        return FAILED
    return DONE


def learn(settings: SftSettings) -> dict[str, Any]:
    """Fine-tune on the rows that the settings mean; a summary, which is also in OUT/sft.json.

    Raises:
        TrainerError: there are no rows, no such model or adapter, or TRL is not the pinned version.
    """
    training_environment(settings.run_folder or settings.output)
    from turngate.trainer.models import resolve_model
    from turngate.trainer.sft_rows import export_rows, read_rows

    found = read_rows(
        export_rows(settings.store, settings.where, settings.output / "rows.jsonl"), settings.max_row_tokens
    )
    log.info("%d rows of %d tasks", len(found.rows), len({row.task for row in found.rows}))
    import torch

    _one_gpu(torch.cuda.device_count())
    from turngate.trainer import trl_names
    from turngate.trainer.sft_seam import RowTrainer
    from turngate.trainer.token_losses import fine_tuning_alarm

    trl_names.check_version()
    prepare_torch(settings.threads, settings.device)
    settings = settings.model_copy(update={"model": str(resolve_model(settings.model))})
    began_s = time.monotonic()
    trainer = RowTrainer(settings, found.rows)
    if untrained := trainer.untrained():
        log.warning("ALARM %s", untrained)
        write_json(settings.output / "sft.json", {"alarms": [untrained]})  # whoever watches need not wait for the end
    trainer.train()
    trainer.lines.close()
    adapter = trainer.write(settings.output / "adapter")
    losses, hardest = trainer.lines.losses, trainer.hardest()
    if alarm := fine_tuning_alarm(hardest):
        log.warning("ALARM %s", alarm)
    summary = {
        "adapter": str(adapter),
        "rows": len(found.rows),
        "tasks": len({row.task for row in found.rows}),
        "left_out": dict(found.left_out),
        "tokens": sum(len(row.ids) for row in found.rows),
        "learnt_tokens": sum(row.learnt_tokens for row in found.rows),
        "steps": len(losses),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "hardest": [one.as_json() for one in hardest],
        "alarms": [one for one in (untrained, alarm) if one],
        "train_s": round(time.monotonic() - began_s, 1),
    }
    write_json(settings.output / "sft.json", summary)
    return summary


def _one_gpu(count: int) -> None:
    """Of several GPUs take the last: TRL refuses to spread one process over them, and engines take the first ones."""
    if count > 1 and "WORLD_SIZE" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", str(count - 1)).split(",")[-1]


def _settings(options: argparse.Namespace) -> SftSettings:
    given = {name: value for name, value in vars(options).items() if name != "config" and value is not None}
    for name in ("lora_targets", "report_to"):
        if name in given:
            given[name] = [part for part in given[name].split(",") if part]
    try:
        return SftSettings.model_validate(read_config(options.config, "sft") | given)
    except ValidationError as error:
        raise SettingsError(settings_words(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate sft",
        description="Fine-tune a LoRA adapter on rows of a store: the recorded or rendered tokens with their masks, as "
        "they are. Every setting may also stand in a YAML file; flags win.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", nargs="?", type=Path, metavar="STORE", help="a store, a run folder, or exported rows")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with the settings or an `sft:` section")
    for name, field in SftSettings.model_fields.items():
        if name == "store":
            continue
        flag = "--out" if name == "output" else f"--{name.replace('_', '-')}"
        text = f"{field.description}{default_words(field)}".replace("%", "%%")
        parser.add_argument(flag, dest=name, metavar="EXPRESSION" if name == "where" else "VALUE", help=text)
    parser.add_argument("--output", help=argparse.SUPPRESS)  # as the setting and `turngate train` have it
    return parser
