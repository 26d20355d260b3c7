"""Identifiers are version 7 UUIDs, in the order in which a process made them whatever its clock does."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from turngate.proxy.ids import Uuid7, uuid7

MS = 1_000_000
NOW_NS = 1_800_000_000_000 * MS


@given(steps_ns=st.lists(st.integers(-3_600_000 * MS, 5 * MS), max_size=60))
def test_they_are_in_order_also_when_the_clock_stands_or_goes_back(steps_ns: list[int]) -> None:
    made, now_ns, ids = Uuid7(), NOW_NS, []
    for step_ns in (0, *steps_ns):
        now_ns += step_ns
        ids.append(made.make(now_ns))
    assert ids == sorted(set(ids))
    assert all(uuid.UUID(one).version == 7 and uuid.UUID(one).variant == uuid.RFC_4122 for one in ids)


@given(utc_ms=st.integers(0, 2**47), random=st.binary(min_size=10, max_size=10))
def test_the_first_48_bits_are_the_time_and_the_rest_is_random(utc_ms: int, random: bytes) -> None:
    value = uuid.UUID(Uuid7().make(utc_ms * MS, random)).int
    assert value >> 80 == utc_ms
    assert value & ((1 << 62) - 1) == int.from_bytes(random, "big") & ((1 << 62) - 1)


def test_a_millisecond_that_is_full_lends_from_the_next() -> None:
    made = Uuid7()
    ids = [made.make(NOW_NS, b"\xff" * 10) for _ in range(5000)]
    assert ids == sorted(set(ids))
    assert {uuid.UUID(one).int >> 80 for one in ids} <= {NOW_NS // MS + k for k in range(4)}


def test_threads_of_a_process_never_make_the_same() -> None:
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda _: uuid7(NOW_NS), range(4000)))
    assert len(set(ids)) == 4000
