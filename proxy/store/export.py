"""`turngate export`: a store as JSON lines or Parquet, for anyone who has `datasets` and no turngate.

Reads only, also while a gateway writes. Never writes a secret.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from turngate.proxy.arguments import Parser
from turngate.proxy.store.errors import StoreError, StoreMissing
from turngate.proxy.store.export_files import write_jsonl, write_parquet
from turngate.proxy.store.export_records import Decode, ExportOptions, rollout_records, row_records, turn_records
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.store.records import RolloutFilter
from turngate.proxy.store.where import Where, WhereError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
KINDS = {"rows": row_records, "turns": turn_records, "rollouts": rollout_records}

HELP = """\
Write a store as JSON lines or Parquet that datasets.load_dataset reads.

  rows      token paths as a trainer gets them: ids, loss mask, log-probs, policy version of each token, reward
  turns     single model calls: prompt and completion ids, log-probs, messages, sampling, timings, label
  rollouts  one line an attempt: task, group, reward, outcome, counts

Values whose shape varies (messages, metrics, sampling) are JSON text. Secrets are never written."""

EXAMPLES = """\
examples:
  turngate export runs/demo --out rows.parquet
  turngate export runs/demo --what turns --text --out turns.jsonl
  turngate export runs/demo --outcome scored --min-reward 0.5 --out good.jsonl
  turngate export runs/demo --where 'demonstration and reward >= 1 and task in ["a", "b"]' --out demos.parquet
  turngate export runs/demo --what rollouts --out - | head

then, in Python:
  datasets.load_dataset("parquet", data_files="rows.parquet", split="train")
  datasets.load_dataset("json", data_files="turns.jsonl", split="train")
Parquet has one fixed schema; prefer it for large stores.

exit status: 0 written, 1 failed, 2 no such store or wrong usage, 130 interrupted"""


def export_command(argv: Sequence[str]) -> int:
    """The `turngate export` command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    form = options.format or ("jsonl" if str(options.out) == "-" else options.out.suffix.lstrip("."))
    if form not in ("jsonl", "parquet"):
        parser.error(f"{options.out}: name it .jsonl or .parquet, or say --format")
    if form == "parquet" and str(options.out) == "-":
        parser.error("Parquet cannot go to standard output; give --out a file name")
    try:
        with StoreReader(options.store) as reader:
            where = RolloutFilter(
                state=options.state,
                outcome=options.outcome,
                task=options.task,
                harness=options.harness,
                group=options.group,
                policy=options.policy,
                min_reward=options.min_reward,
            )
            text = _decoder(reader) if options.text else None
            meant = Where.parse(options.where)
            chosen = ExportOptions(where, meant, frozenset(options.label), text, options.compact)
            records = KINDS[options.what](reader, chosen)
            count = write_parquet(records, options.out) if form == "parquet" else write_jsonl(records, options.out)
    except WhereError as error:
        return _failed(f"--where: {error}", USAGE)
    except StoreMissing as error:
        return _failed(str(error), USAGE)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _failed(f"{options.out} cannot be written: {error.strerror or error}", FAILED)
    except (StoreError, ValueError) as error:
        return _failed(str(error), FAILED)
    except ModuleNotFoundError as error:
        return _failed(f"Parquet needs the package {error.name!r}: pip install 'turngate[export]'", FAILED)
    except KeyboardInterrupt:
        return _failed("interrupted; nothing was written", INTERRUPTED)
    if str(options.out) != "-":
        print(f"{count} {options.what} written to {options.out}")
    return OK


def _decoder(reader: StoreReader) -> Decode:
    path = reader.folder.tokenizer
    if not path.exists():
        raise StoreError(f"--text needs the model's tokenizer, but {path} was not kept with this run; leave it out")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _failed(why: str, status: int) -> int:
    print(f"turngate export: {why}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate export",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", type=Path, help="a store folder, or a run folder that has one")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl or .parquet; - for stdout")
    parser.add_argument("--what", choices=sorted(KINDS), default="rows", help="what a line is (default: rows)")
    parser.add_argument("--format", choices=("jsonl", "parquet"), help="default: from the file's name; jsonl for -")
    parser.add_argument("--text", action="store_true", help="add decoded text, with the run's own tokenizer")
    parser.add_argument(
        "--compact", action="store_true", help="turns: only what each adds, without whole prompts and old messages"
    )
    chosen = parser.add_argument_group("which rollouts (all must hold; default: all)")
    chosen.add_argument("--state", choices=("open", "finished"))
    chosen.add_argument("--outcome", choices=("scored", "unscorable", "cancelled"))
    chosen.add_argument("--task", metavar="NAME")
    chosen.add_argument("--group", metavar="ID")
    chosen.add_argument("--harness", metavar="NAME")
    chosen.add_argument("--policy", metavar="NAME")
    chosen.add_argument(
        "--where",
        default="",
        metavar="EXPRESSION",
        help="comparisons of fields with and, or, not: reward, task, harness, outcome, cause, group, policy, version, "
        "label, state, training, demonstration, rollout, rewards.KEY, metrics.KEY, metadata.KEY",
    )
    chosen.add_argument("--min-reward", type=float, metavar="R")
    chosen.add_argument(
        "--label",
        action="append",
        default=[],
        choices=("main", "subagent", "side", "compaction"),
        help="turns with this label, or rows that train it; may be repeated (default: all turns, rows as trained)",
    )
    return parser
