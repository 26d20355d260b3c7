"""`turngate verify`: prove that what a store would train on is what was sampled.

Three independent witnesses: digests taken when a turn was committed, structure that must hold whatever the digests
say, and digests of the rows that were handed to a trainer. It only reads, also while a gateway writes, and guesses
nothing: what cannot be checked is counted as such.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from turngate.proxy.arguments import Parser
from turngate.proxy.checks import RunFacts, check_turn, stop_is_checked
from turngate.proxy.rerender import Rerendered, Rerenderer
from turngate.proxy.rescore import Rescored, RescoreError, Rescorer, choose, comparable
from turngate.proxy.rows import TRAINED_LABELS, Row, build_rows
from turngate.proxy.store.codec import row_digest, seal_digest, turn_digest
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.errors import NotFound, StoreDamaged, StoreError, StoreMissing
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import BrokenTree, Turn, by_id

MAX_PROBLEMS = 1000  # kept; the rest is only counted
SHOWN_PROBLEMS = 20
OK, FAILED, USAGE = 0, 1, 2

HELP = """\
Prove that the rows of a store are the tokens that were sampled.

Every turn is compared with the digest taken when it was committed and with what must hold whatever the digest says
(lengths, log-probs, version spans, base turns, stop tokens); every row is rebuilt and compared with the row that was
handed to training. Nothing is written, and a gateway may be writing meanwhile."""

EXAMPLES = """\
examples:
  turngate verify runs/demo                      a run folder, or its store
  turngate verify store --json                   one JSON object, for scripts
  turngate verify store --engine http://127.0.0.1:8000 --sample 32
                                                 also score 32 turns again through vLLM

exit status: 0 everything is exact, 1 problems were found, 2 no such store or wrong usage, 130 interrupted"""


@dataclass(slots=True)
class VerifyReport:
    """What was found.

    `rows` are all rows of all rollouts, `exact_rows` those whose rollout has no problem; `served_rows` those handed to
    a trainer. `sampled_tokens` are the tokens in the rows' loss masks, `trained_tokens` those of them in groups that
    a trainer acknowledged as trained. `unchecked_stops` are stopped turns whose end nothing recorded could confirm.
    """

    store: str
    run: str
    rollouts: int = 0
    turns: int = 0
    spliced: int = 0
    breaks: Counter[str] = field(default_factory=Counter)
    transparent_turns: int = 0
    demonstrated_turns: int = 0
    rows: int = 0
    exact_rows: int = 0
    served_rows: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    unchecked_stops: int = 0
    problem_count: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.problem_count == 0 and self.rows == self.exact_rows

    def add(self, problem: str) -> None:
        """Note one problem."""
        self.problem_count += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)

    def as_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {"ok": self.ok, **values, "breaks": dict(self.breaks)}


def verify_store(path: Path | str) -> VerifyReport:
    """Check every turn and row of a store (or of a run folder's store), without an engine.

    Raises:
        StoreMissing: there is no store. SchemaTooNew, StoreDamaged: it cannot be read at all.
    """
    with StoreReader(path) as reader:
        report = VerifyReport(str(reader.folder.path), reader.folder.run)
        facts = run_facts(reader.folder, reader.control)
        seen: set[str] = set()
        for store in reader.stores:
            for fault in store.check_file():
                report.add(f"{store.path.name}: SQLite finds: {fault}")
            for rollout in store.rollouts():
                seen.add(rollout)
                _check_rollout(report, reader.control, store, rollout, facts)
        for record in reader.rollouts():
            if record.sealed_turns and record.id not in seen:
                report.add(f"rollout {record.id}: finished with {record.sealed_turns} turns, but none is stored")
    return report


def rescore_store(path: Path | str, engine: str, *, sample: int, seed: int, tolerance: float) -> Rescored:
    """Score a sample of a store's turns again through a vLLM server and compare.

    Raises:
        RescoreError: the engine does not answer. StoreError: the store cannot be read.
    """
    places: list[tuple[str, str]] = []
    with StoreReader(path) as reader, Rescorer(engine, tolerance=tolerance) as rescorer:
        for store in reader.stores:
            for rollout in store.rollouts():
                turns = store.turns(rollout)
                places += [(rollout, turn.id) for turn in turns if comparable(turn)]
                rescorer.result.not_comparable += sum(not comparable(turn) for turn in turns)
        for rollout, turn_id in choose(places, sample, seed):
            known = by_id(reader.turns(rollout))
            rescorer.check(known, known[turn_id])
    return rescorer.result


def rerender_store(path: Path | str, engine: str) -> Rerendered:
    """Render every demonstration of a store again through a vLLM server of the student and compare.

    Raises:
        RescoreError: the engine does not render. StoreError: the store cannot be read.
    """
    with StoreReader(path) as reader, Rerenderer(engine, reader.folder.stop_ids()) as rerenderer:
        for store in reader.stores:
            for rollout in store.rollouts():
                known = by_id(store.turns(rollout))
                for turn in known.values():
                    if turn.mode == "demonstration":
                        rerenderer.check(known, turn)
    return rerenderer.result


def run_facts(folder: StoreFolder, control: ControlStore) -> RunFacts:
    """Stop tokens, adapter names and the tokenizer, as far as the run kept them."""
    stop_ids, text_of = folder.stop_ids(), None
    if folder.tokenizer.exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder.tokenizer))
        special = (token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        stop_ids = stop_ids | frozenset(special)

        def text_of(ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=False))

    adapters = {(adapter.policy, adapter.version): adapter.name for adapter in control.adapters()}
    return RunFacts(stop_ids, adapters, text_of)


def _check_rollout(
    report: VerifyReport, control: ControlStore, store: TurnStore, rollout: str, facts: RunFacts
) -> None:
    """Control first, turns after: a finished rollout gets no more turns, so the two agree while a gateway writes."""
    before = report.problem_count
    report.rollouts += 1
    try:
        record: RolloutRecord | None = control.rollout(rollout)
    except NotFound:
        record = None
        report.add(f"rollout {rollout}: it has turns, but the control store does not know it")
    served = control.served_rows(rollout)
    turns = _read_turns(report, store, rollout)
    known = by_id(turns)
    for turn in turns:
        _count(report, turn, facts)
        for problem in check_turn(turn, known, facts):
            report.add(f"rollout {rollout} turn {turn.id} (seq {turn.seq}): {problem}")
    if record is not None and record.sealed_turns is not None:
        digest = seal_digest(turn_digest(turn) for turn in turns)
        if (len(turns), digest) != (record.sealed_turns, record.seal):
            report.add(
                f"rollout {rollout}: its {len(turns)} turns are not the {record.sealed_turns} it was finished with"
            )
    rows = _rows(report, rollout, turns, record.new.trained_labels if record else TRAINED_LABELS)
    _compare_served(report, rollout, rows, served)
    masked = sum(int(row.mask.sum()) for row in rows)
    report.rows += len(rows)
    report.sampled_tokens += masked
    if record is not None and _was_trained(control, record):
        report.trained_tokens += masked
    if report.problem_count == before:
        report.exact_rows += len(rows)


def _read_turns(report: VerifyReport, store: TurnStore, rollout: str) -> list[Turn]:
    turns = []
    for turn_id, digest in store.digests(rollout):
        try:
            turn = store.turn(turn_id)
        except StoreDamaged as error:
            report.add(f"rollout {rollout}: {error}")
            continue
        if turn_digest(turn) != digest:
            report.add(
                f"rollout {rollout} turn {turn.id} (seq {turn.seq}): its content is not what was committed (digest "
                f"{turn_digest(turn).hex()}, at commit {digest.hex()})"
            )
        turns.append(turn)
    return turns


def _count(report: VerifyReport, turn: Turn, facts: RunFacts) -> None:
    report.turns += 1
    report.spliced += turn.kind == "spliced"
    report.transparent_turns += turn.mode == "transparent"
    report.demonstrated_turns += turn.mode == "demonstration"
    report.unchecked_stops += not stop_is_checked(turn, facts)
    if turn.kind == "break":
        report.breaks[turn.break_cause or "unknown"] += 1


def _rows(report: VerifyReport, rollout: str, turns: list[Turn], labels: Collection[str]) -> list[Row]:
    try:
        return build_rows(turns, labels)
    except (BrokenTree, KeyError, ValueError) as error:
        report.add(f"rollout {rollout}: no rows can be built: {error}")
        return []


def _compare_served(report: VerifyReport, rollout: str, rows: list[Row], served: list[tuple[int, bytes]]) -> None:
    if not served:
        return
    report.served_rows += len({place for place, _ in served})
    rebuilt = [row_digest(row) for row in rows]
    for place, digest in served:
        if place >= len(rebuilt):
            report.add(f"rollout {rollout}: row {place} was handed to training, but the turns give {len(rows)} rows")
        elif rebuilt[place] != digest:
            report.add(f"rollout {rollout}: row {place} as rebuilt is not the row handed to training")
    missing = set(range(len(rows))) - {place for place, _ in served}
    if missing:
        report.add(f"rollout {rollout}: rows {sorted(missing)} were left out of what was handed to training")


def _was_trained(control: ControlStore, record: RolloutRecord) -> bool:
    if not record.member or record.outcome != "scored" or record.new.group is None:
        return False
    return control.group(record.new.group).state == "trained"


def verify_command(argv: Sequence[str]) -> int:
    """The `turngate verify` command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        report = verify_store(options.store)
        rescored, rerendered = None, None
        if options.engine:
            if report.demonstrated_turns:
                rerendered = rerender_store(options.store, options.engine)
            rescored = rescore_store(
                options.store, options.engine, sample=options.sample, seed=options.seed, tolerance=options.tolerance
            )
            for problem in [*rescored.problems, *(rerendered.problems if rerendered else ())]:
                report.add(problem)
    except StoreMissing as error:
        print(f"turngate verify: {error}", file=sys.stderr)
        return USAGE
    except (StoreError, RescoreError) as error:
        print(f"turngate verify: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("turngate verify: interrupted", file=sys.stderr)
        return 130
    if options.json:
        found = report.as_json() | {"engine": rescored.as_json() if rescored else None}
        found["demonstrations"] = rerendered.as_json() if rerendered else None
        print(orjson.dumps(found).decode())
    else:
        _show(report, rescored, rerendered)
    return OK if report.ok else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="turngate verify",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("store", type=Path, help="a store folder, or a run folder that has one")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="a vLLM server of the same model, best one that serves nobody else: also rescore a sample of turns, and "
        "render all demonstrations again",
    )
    parser.add_argument("--sample", type=int, default=16, metavar="N", help="turns to rescore (default: 16)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which turns are sampled (default: 0)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1.0,
        metavar="NATS",
        help="how far one token's log-prob may be off, and four times how far a turn's mean may (default: 1.0, which "
        "bf16 engines stay well within; fp32 agrees to 0.001)",
    )
    return parser


def _show(report: VerifyReport, rescored: Rescored | None, rerendered: Rerendered | None) -> None:
    table = Table(title=f"run {report.run}: {report.store}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    lines: dict[str, Any] = {
        "rollouts": report.rollouts,
        "turns": report.turns,
        "  spliced": report.spliced,
        "  breaks": sum(report.breaks.values()),
        **{f"    {cause}": count for cause, count in report.breaks.most_common()},
        "  transparent": report.transparent_turns,
        "  demonstrated": report.demonstrated_turns,
        "rows": report.rows,
        "  exact_rows": report.exact_rows,
        "  handed to training": report.served_rows,
        "sampled tokens": report.sampled_tokens,
        "trained tokens": report.trained_tokens,
    }
    if report.unchecked_stops:
        lines["stops that could not be checked"] = report.unchecked_stops
    if rescored is not None:
        lines |= {
            f"rescored turns ({rescored.engine})": rescored.turns,
            "  tokens": rescored.tokens,
            "  max |difference|": f"{rescored.max_delta:.5f}",
            "  mean |difference|": f"{rescored.mean_delta:.5f}",
            "  not comparable": rescored.not_comparable,
            "  adapter not loaded": rescored.not_loaded,
            "  too long for the engine": rescored.too_long,
        }
    if rerendered is not None:
        lines |= {"demonstrations rendered again": rerendered.turns, "  rendered apart, not compared": rerendered.apart}
    lines["problems"] = report.problem_count
    for name, value in lines.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for problem in report.problems[:SHOWN_PROBLEMS]:
        console.print("[red]✗[/red]", escape(problem))
    if report.problem_count > SHOWN_PROBLEMS:
        console.print(f"… and {report.problem_count - SHOWN_PROBLEMS} more (see --json)")
