"""Turns come back as they went in, survive, and are refused in clear words when they cannot be kept."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proxy.store.samples import TOOLS, make_rollout_turns, make_turn
from turngate.proxy.store import codec
from turngate.proxy.store.errors import (
    Conflict,
    NotFound,
    SchemaTooNew,
    StoreBusy,
    StoreDamaged,
    StoreFull,
    StoreMissing,
)
from turngate.proxy.store.turnstore import MIGRATIONS, TurnStore
from turngate.proxy.turns import Span, Timings, Turn, full_messages

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=8), json_values, max_size=3)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda values: np.asarray(values, np.int32))


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    completion = draw(ids)
    sampled, top_k = len(completion), draw(st.sampled_from([None, 1, 3]))
    floats = st.lists(st.floats(-1e6, 0, width=32), min_size=sampled, max_size=sampled)
    request = {
        "messages": draw(st.lists(objects, max_size=3)),
        "tools": draw(st.none() | st.lists(objects, max_size=3)),
    }
    return Turn(
        id=draw(st.uuids()).hex,
        rollout=draw(st.text(min_size=1, max_size=20)),
        seq=draw(st.integers(0, 2**31)),
        kind=draw(st.sampled_from(["first", "spliced", "break"])),
        base=draw(st.none() | st.text()),
        base_tokens=draw(st.integers(0, 2**31)),
        break_cause=draw(st.none() | st.text()),
        tail_ids=draw(ids),
        completion_ids=completion,
        logprobs=np.asarray(draw(floats), np.float32),
        spans=(Span(0, sampled, "policy", draw(st.integers(0, 9)), draw(st.none() | st.text())),),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        stop_reason=draw(st.none() | st.integers(0, 9) | st.text()),
        timings=Timings(1, 2, 3, 4, draw(st.integers(0, 2**62))),
        top_ids=None if top_k is None else np.ones((sampled, top_k), np.int32),
        top_logprobs=None if top_k is None else np.full((sampled, top_k), -1.5, np.float16),
        sampling_asked=draw(objects),
        sampling_used=draw(objects),
        request=request,
        response=draw(objects),
        flags=tuple(draw(st.lists(st.text(max_size=8), max_size=3))),
    )


def same(one: Turn, other: Turn) -> bool:
    for name in Turn.__slots__:
        left, right = getattr(one, name), getattr(other, name)
        if isinstance(left, np.ndarray):
            if left.dtype != right.dtype or left.shape != right.shape or left.tobytes() != right.tobytes():
                return False
        elif left != right:
            return False
    return True


@given(turns())
@settings(max_examples=60, deadline=None)
def test_the_codec_gives_back_the_same_turn_and_digest(turn: Turn) -> None:
    packed = codec.pack(turn)
    row = dict(zip(codec.COLUMNS, packed.values, strict=True))
    blobs: dict[Any, Any] = {packed.tools_hash: packed.tools_json}
    back = codec.unpack(row, lambda key: codec.loads(blobs[key]))
    assert same(back, turn)
    assert codec.turn_digest(back) == row["digest"]


def test_half_a_surrogate_pair_survives(tmp_path: Path) -> None:
    request = {"messages": [{"role": "user", "content": "broken \ud83d emoji"}], "tools": None}
    with TurnStore(tmp_path / "turns-0.sqlite") as store:
        store.commit([make_turn("r", 0, request=request)])
        assert store.turns("r")[0].request == request


def test_committed_turns_are_read_by_rollout_in_order_and_by_id(tmp_path: Path) -> None:
    recorded = {name: make_rollout_turns(name) for name in ("b", "a")}
    with TurnStore(tmp_path / "turns-0.sqlite") as store:
        for some in recorded.values():
            store.commit(some[::-1])
    with TurnStore(tmp_path / "turns-0.sqlite", readonly=True) as store:
        assert list(store.rollouts()) == ["a", "b"]
        for name, some in recorded.items():
            read = store.turns(name)
            assert all(same(left, right) for left, right in zip(read, some, strict=True))
            assert full_messages({turn.id: turn for turn in read}, read[1])[1] == read[0].response
        assert same(store.turn("a-turn-2"), recorded["a"][2])
        assert store.turns("nobody") == []
        with pytest.raises(NotFound):
            store.turn("nothing")


def test_counts_are_the_same_while_writing_and_when_read_again(tmp_path: Path) -> None:
    path = tmp_path / "turns-0.sqlite"
    with TurnStore(path) as store:
        store.commit(make_rollout_turns("a"))
        store.commit(make_rollout_turns("b"))
        live = store.counts()
        assert store.counts("a").turns == 3
        assert store.counts_of(["a", "none"])["none"].turns == 0
    with TurnStore(path) as again:
        assert again.counts() == live
        assert sum(one.turns for one in again.sums()) == live.turns
    assert (live.turns, live.spliced, dict(live.breaks), live.completion_tokens) == (
        *(6, 2),
        {"history_rewritten": 2},
        30,
    )


def test_tools_are_kept_once_however_many_turns_offer_them(tmp_path: Path) -> None:
    big = [{"function": {"name": f"tool{i}", "description": "long " * 200}} for i in range(30)]
    path = tmp_path / "turns-0.sqlite"
    with TurnStore(path) as store:
        for number in range(20):
            store.commit([make_turn(f"r{number}", 0, request={"messages": [], "tools": big, "params": {}})])
    with TurnStore(path) as store:
        store.commit([make_turn("later", 0, request={"messages": [], "tools": big, "params": {}})])
        assert store.turns("r7")[0].request["tools"] == store.turns("later")[0].request["tools"] == big
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM blobs").fetchone() == (1,)
    connection.close()


def test_a_transaction_is_whole_or_not_at_all(tmp_path: Path) -> None:
    first, second, third = make_rollout_turns("a")
    with TurnStore(tmp_path / "turns-0.sqlite") as store:
        store.commit([first])
        with pytest.raises(Conflict):
            store.commit([second, third, first])
        assert [turn.id for turn in store.turns("a")] == [first.id]
        assert store.counts().turns == 1
        store.commit([second, third])


def test_a_full_disk_loses_nothing_and_is_said(tmp_path: Path) -> None:
    with TurnStore(tmp_path / "turns-0.sqlite") as store:
        store.commit([make_turn("a", 0)])
        assert store._writer is not None
        store._writer.execute("PRAGMA max_page_count = 1")
        noise = np.random.default_rng(0).integers(0, 2**31 - 1, 200_000).astype(np.int32)
        with pytest.raises(StoreFull, match="no space left"):
            store.commit([make_turn("a", 1, tail_ids=noise)])
        store._writer.execute("PRAGMA max_page_count = 1000000")
        store.commit([make_turn("a", 1, tail_ids=noise)])
        assert len(store.turns("a")) == 2


def test_one_file_has_one_writer_and_any_number_of_readers(tmp_path: Path) -> None:
    path = tmp_path / "turns-0.sqlite"
    with TurnStore(path) as store:
        with pytest.raises(StoreBusy, match="owned by another running gateway"):
            TurnStore(path)
        reader = TurnStore(path, readonly=True)
        before = reader.data_version()
        store.commit(make_rollout_turns("a"))
        assert reader.data_version() != before
        assert len(reader.turns("a")) == 3
        reader.close()
    TurnStore(path).close()


def test_another_process_reads_while_this_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "turns-0.sqlite"
    program = (
        "import sys; from pathlib import Path; from turngate.proxy.store.turnstore import TurnStore;"
        "print(TurnStore(Path(sys.argv[1]), readonly=True).counts().turns)"
    )
    with TurnStore(path) as store:
        store.commit(make_rollout_turns("a"))
        seen = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "3"


def test_a_newer_schema_is_refused_in_clear_words(tmp_path: Path) -> None:
    path = tmp_path / "turns-0.sqlite"
    TurnStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(SchemaTooNew, match="use the release that wrote it"):
        TurnStore(path)
    with pytest.raises(SchemaTooNew):
        TurnStore(path, readonly=True)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        TurnStore(tmp_path / "turns-0.sqlite", readonly=True)
    (tmp_path / "turns-1.sqlite").write_bytes(b"not a database at all, but long enough to look at" * 50)
    with pytest.raises(StoreDamaged):
        TurnStore(tmp_path / "turns-1.sqlite")


def test_a_turn_costs_what_it_adds(tmp_path: Path) -> None:
    """The 40th turn of a session takes no more bytes than the 2nd."""
    sizes, base = [], None
    for seq in range(40):
        base = make_turn("r", seq, base, request={"messages": [{"role": "user", "content": "x"}], "tools": TOOLS})
        sizes.append(sum(len(value) for value in codec.pack(base).values if isinstance(value, bytes)))
    assert max(sizes) - min(sizes) < 32
