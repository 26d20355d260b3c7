"""`verify` believes nothing: each of its witnesses, alone, contradicts a store that was changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from tests.proxy.store.samples import STOP_ID, SampleStore, make_store, make_turn
from turngate.proxy.checks import RunFacts, check_turn
from turngate.proxy.store import codec
from turngate.proxy.store.errors import StoreMissing
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import Span, Turn
from turngate.proxy.verify import VerifyReport, verify_command, verify_store

FACTS = RunFacts(stop_ids=frozenset({STOP_ID}))


def other_id(turn: Turn) -> Turn:
    """One sampled id is another."""
    ids = turn.completion_ids.copy()
    ids[1] += 1
    return replace(turn, completion_ids=ids)


def other_prompt_id(turn: Turn) -> Turn:
    """One prompt id is another."""
    ids = turn.tail_ids.copy()
    ids[0] += 1
    return replace(turn, tail_ids=ids)


def shifted_logprobs(turn: Turn) -> Turn:
    """Each log-prob stands one token further."""
    return replace(turn, logprobs=np.roll(turn.logprobs, 1))


def no_stop_token(turn: Turn) -> Turn:
    """The stop token is gone, consistently: ids, log-probs and span agree."""
    end = len(turn.completion_ids) - 1
    return replace(
        turn,
        completion_ids=turn.completion_ids[:-1],
        logprobs=turn.logprobs[:-1],
        spans=(replace(turn.spans[0], end=end),),
    )


def other_version(turn: Turn) -> Turn:
    """Sampled, it says, by a version that was never published."""
    return replace(turn, spans=(Span(0, len(turn.completion_ids), "policy", 7, "policy-run1-v7"),))


CHANGES = [other_id, other_prompt_id, shifted_logprobs, no_stop_token, other_version]


def rewrite(sample: SampleStore, change: Callable[[Turn], Turn], *, with_digest: bool) -> None:
    """Write a changed turn over a recorded one, as the codec would have; with a fresh digest when asked."""
    path = sample.folder.turns(0)
    with TurnStore(path, readonly=True) as store:
        changed = change(store.turn(f"{sample.rollouts[1]}-turn-1"))
    values = dict(zip(codec.COLUMNS, codec.pack(changed).values, strict=True))
    if not with_digest:
        del values["digest"]
    connection = sqlite3.connect(path)
    with connection:
        columns = ", ".join(f"{name} = ?" for name in values)
        connection.execute(f"UPDATE turns SET {columns} WHERE id = ?", (*values.values(), changed.id))
    connection.close()


def forget(sample: SampleStore, *statements: str) -> None:
    """Take witnesses away from the control store."""
    connection = sqlite3.connect(sample.folder.control)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


NO_SEAL = "UPDATE rollouts SET sealed_turns = NULL, seal = NULL"
NO_SERVED = "DELETE FROM served_rows"


def about_one_turn(report: VerifyReport) -> list[str]:
    return [problem for problem in report.problems if "rollout-1-turn-1" in problem]


@pytest.fixture
def sample(tmp_path: Path) -> SampleStore:
    return make_store(tmp_path / "run" / "store")


def test_a_store_as_the_gateway_leaves_it_is_exact(sample: SampleStore) -> None:
    report = verify_store(sample.folder.path)
    assert report.problems == []
    assert report.ok
    assert (report.rollouts, report.turns, report.spliced) == (2, 6, 2)
    assert (report.rows, report.exact_rows, report.served_rows) == (4, 4, 4)
    assert dict(report.breaks) == {"history_rewritten": 2}
    assert report.sampled_tokens == report.trained_tokens == 2 * 3 * 5


def test_a_run_folder_is_as_good_as_its_store(sample: SampleStore) -> None:
    assert verify_store(sample.folder.path.parent).ok


def test_verify_reads_while_the_gateway_writes(sample: SampleStore) -> None:
    with TurnStore(sample.folder.turns(0)) as writing:
        writing.commit([make_turn(sample.rollouts[0], 9)])
        report = verify_store(sample.folder.path)
    assert report.turns == 7


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_of_the_commit_contradicts_a_changed_turn(
    sample: SampleStore, change: Callable[[Turn], Turn]
) -> None:
    rewrite(sample, change, with_digest=False)
    forget(sample, NO_SEAL, NO_SERVED)
    report = verify_store(sample.folder.path)
    assert any("is not what was committed" in problem for problem in about_one_turn(report))
    assert not report.ok
    assert report.exact_rows == 2 < report.rows


@pytest.mark.parametrize("change", [no_stop_token, other_version])
def test_structure_contradicts_a_changed_turn_whose_digest_was_made_anew(
    sample: SampleStore, change: Callable[[Turn], Turn]
) -> None:
    rewrite(sample, change, with_digest=True)
    forget(sample, NO_SEAL, NO_SERVED)
    report = verify_store(sample.folder.path)
    assert len(about_one_turn(report)) == 1
    assert not report.ok


@pytest.mark.parametrize("change", CHANGES)
def test_the_rows_handed_to_training_contradict_a_changed_turn_whose_digest_was_made_anew(
    sample: SampleStore, change: Callable[[Turn], Turn]
) -> None:
    rewrite(sample, change, with_digest=True)
    forget(sample, NO_SEAL)
    report = verify_store(sample.folder.path)
    assert any("is not the row handed to training" in problem for problem in report.problems)


@pytest.mark.parametrize("change", CHANGES)
def test_the_seal_of_a_finished_rollout_contradicts_a_changed_turn_whose_digest_was_made_anew(
    sample: SampleStore, change: Callable[[Turn], Turn]
) -> None:
    rewrite(sample, change, with_digest=True)
    forget(sample, NO_SERVED)
    report = verify_store(sample.folder.path)
    assert any("it was finished with" in problem for problem in report.problems)


def test_a_deleted_turn_is_missed(sample: SampleStore) -> None:
    connection = sqlite3.connect(sample.folder.turns(0))
    with connection:
        connection.execute("DELETE FROM turns WHERE id = 'rollout-1-turn-2'")
    connection.close()
    problems = verify_store(sample.folder.path).problems
    assert any("2 turns are not the 3" in problem for problem in problems)
    assert any("row 1 was handed to training" in problem for problem in problems)


def test_all_turns_of_a_rollout_deleted_are_missed(sample: SampleStore) -> None:
    connection = sqlite3.connect(sample.folder.turns(0))
    with connection:
        connection.execute("DELETE FROM turns WHERE rollout = 'rollout-1'")
    connection.close()
    assert "rollout rollout-1: finished with 3 turns, but none is stored" in verify_store(sample.folder.path).problems


def test_bytes_that_are_no_turn_are_one_problem_not_a_crash(sample: SampleStore) -> None:
    connection = sqlite3.connect(sample.folder.turns(0))
    with connection:
        connection.execute("UPDATE turns SET body = x'01ff' WHERE id = 'rollout-0-turn-1'")
    connection.close()
    report = verify_store(sample.folder.path)
    assert any("cannot be read" in problem for problem in report.problems)
    assert report.turns == 5


def wrong(**changed: object) -> list[str]:
    turn = replace(make_turn("r", 0), **changed)
    return check_turn(turn, {turn.id: turn}, FACTS)


def test_structure_names_what_is_wrong() -> None:
    assert wrong() == []
    assert "4 log-probs" in wrong(logprobs=np.full(4, -1, np.float32))[0]
    assert "above 0" in wrong(logprobs=np.array([-1, 0.5, -1, -1, -1], np.float32))[0]
    assert "not finite" in wrong(logprobs=np.array([-1, -1, np.nan, -1, -1], np.float32))[0]
    assert "spans cover 3 of 5" in wrong(spans=(Span(0, 3, "p", 0, None),))[0]
    assert "does not begin" in wrong(spans=(Span(0, 3, "p", 0, None), Span(4, 5, "p", 0, None)))[0]
    assert "adapter None, not x" in wrong(spans=(Span(0, 5, "p", 0, "x"),))[0]
    assert "does not have them" in wrong(kind="spliced", base="nowhere", base_tokens=3)[0]
    assert "negative" in wrong(tail_ids=np.array([-1], np.int32))[0]
    assert "max_tokens 3" in wrong(sampling_used={"max_tokens": 3})[0]
    assert "without a cause" in wrong(kind="break")[0]
    assert "stopped by token 7" in wrong(stop_reason=7)[0]


def test_a_stop_string_is_looked_for_in_the_text_of_the_last_tokens() -> None:
    turn = replace(make_turn("r", 0), stop_reason="END")
    assert check_turn(turn, {}, RunFacts(text_of=lambda ids: "the END")) == []
    assert "stopped by 'END'" in check_turn(turn, {}, RunFacts(text_of=lambda ids: "the en"))[0]


def test_a_stop_that_nothing_can_confirm_is_counted(sample: SampleStore) -> None:
    sample.folder.note(stop_ids=[])
    report = verify_store(sample.folder.path)
    assert report.ok
    assert report.unchecked_stops == 6


def test_the_command_says_what_it_found(sample: SampleStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_command([str(sample.folder.path), "--json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert (found["rows"], found["exact_rows"], found["trained_tokens"]) == (4, 4, 30)
    rewrite(sample, other_id, with_digest=False)
    assert verify_command([str(sample.folder.path)]) == 1
    shown = capsys.readouterr().out
    assert "exact_rows" in shown
    assert "history_rewritten" in shown
    assert "is not what was committed" in shown


def test_no_store_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StoreMissing):
        verify_store(tmp_path)
    assert verify_command([str(tmp_path)]) == 2
    assert "neither a store" in capsys.readouterr().err
