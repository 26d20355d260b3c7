"""Leasing in the background, against the wire over real HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.trainer.make import group, rollout, wire_row
from tests.trainer.stub_gateway import KEY, POLICY, StubGateway
from turngate.proxy import wire
from turngate.proxy.client import GatewayClient
from turngate.trainer.errors import GatewayLost
from turngate.trainer.lease_source import LeaseSource, LeaseTerms

Start = Callable[..., LeaseSource]


def scored(name: str, *rewards: float) -> wire.LeasedGroup:
    return group(
        name, *(rollout(f"{name}-{i}", r, wire_row(f"{name}-{i}", [1, 2], [3, 4])) for i, r in enumerate(rewards))
    )


@pytest.fixture
def stub() -> Iterator[StubGateway]:
    with StubGateway(None) as gateway:
        yield gateway


@pytest.fixture
def start(stub: StubGateway) -> Iterator[Start]:
    made: list[LeaseSource] = []

    def make(
        *,
        lineage: dict[str, int] | None = None,
        step: int = 0,
        patience_s: float = 20,
        ttl_s: float = 30,
        key: str = KEY,
    ) -> LeaseSource:
        client = GatewayClient(stub.url, key)
        terms = LeaseTerms(policy=POLICY, ahead=4, ttl_s=ttl_s, patience_s=patience_s, max_row_tokens=None)
        source = LeaseSource(client, terms, lineage={} if lineage is None else lineage, step=step)
        source.start()
        made.append(source)
        return source

    yield make
    for source in made:
        source.stop()
        source.client.close()


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline, "it did not happen within 20 s"
        time.sleep(0.01)


def test_a_ready_group_arrives_whole_and_is_settled_with_its_step(stub: StubGateway, start: Start) -> None:
    stub.prepared = [scored("g", 0.0, 1.0)]
    source = start()
    ready = source.next_group(20)
    assert ready is not None
    assert [row.rollout for row in ready.rows] == ["g-0", "g-1"]
    source.trained([ready], 1, {"g": [{"rollout": "g-0"}]})
    step, ack = stub.acks["g"]
    assert (step, ack.fate, ack.rows) == (1, "trained", [{"rollout": "g-0"}])
    assert source.lineage == {"g": 1}


def test_a_group_without_variance_is_settled_at_once_and_counted(stub: StubGateway, start: Start) -> None:
    stub.prepared = [scored("flat", 1.0, 1.0), scored("lonely", 1.0), scored("good", 0.0, 1.0)]
    source = start(step=6)
    ready = source.next_group(20)
    assert ready is not None
    assert ready.id == "good"
    assert stub.acks["flat"] == (7, wire.GroupAck(group="flat", fate="zero_variance"))
    assert stub.acks["lonely"][1].fate == "dropped"
    counts = source.take_counts()
    assert counts["zero_variance"] == 1
    assert source.take_counts() == {}


def test_a_gateway_that_is_away_for_a_while_is_asked_again(stub: StubGateway, start: Start) -> None:
    stub.failures = 3
    stub.prepared = [scored("g", 0.0, 1.0)]
    source = start()
    assert source.next_group(20) is not None


def test_a_gateway_away_for_longer_than_the_patience_ends_the_run(stub: StubGateway, start: Start) -> None:
    stub.failures = 10_000
    source = start(patience_s=0.2)
    with pytest.raises(GatewayLost, match="gave up"):
        until(lambda: source.next_group(0.05) is not None)


def test_a_refusal_is_not_asked_again(stub: StubGateway, start: Start) -> None:
    source = start(key="wrong")
    with pytest.raises(GatewayLost, match="refuses"):
        until(lambda: source.next_group(0.05) is not None)


def test_a_group_of_the_lineage_that_comes_back_is_acknowledged_but_not_trained(
    stub: StubGateway, start: Start
) -> None:
    stub.prepared = [scored("old", 0.0, 1.0), scored("new", 0.0, 1.0)]
    source = start(lineage={"old": 3}, step=4)
    ready = source.next_group(20)
    assert ready is not None
    assert ready.id == "new"
    assert stub.acks["old"] == (3, wire.GroupAck(group="old", fate="trained"))


def test_a_group_leased_again_while_waiting_is_trained_once_under_the_new_lease(
    stub: StubGateway, start: Start
) -> None:
    stub.prepared = [scored("g", 0.0, 1.0)]
    source = start()
    until(lambda: source.rollout_buffer.qsize() == 1)
    stub.state["g"] = "ready"
    until(lambda: stub.state["g"] == "leased")
    ready = source.next_group(20)
    assert ready is not None
    time.sleep(0.5)
    assert source.rollout_buffer.empty()
    source.trained([ready], 1, {})
    assert stub.history == [("g", "trained", 1)]


def test_a_lease_lost_at_the_acknowledgement_leaves_the_group_in_the_lineage(stub: StubGateway, start: Start) -> None:
    stub.prepared = [scored("g", 0.0, 1.0)]
    source = start()
    ready = source.next_group(20)
    assert ready is not None
    stub._epochs["lease-g"] += 1
    source.trained([ready], 1, {})
    assert stub.history == []
    stub.state["g"] = "ready"
    until(lambda: stub.history == [("g", "trained", 1)])
    assert source.rollout_buffer.empty()


def test_leases_are_kept_by_heartbeats(stub: StubGateway, start: Start) -> None:
    stub.prepared = [scored("g", 0.0, 1.0)]
    source = start(ttl_s=0.4)
    until(lambda: source.rollout_buffer.qsize() == 1)
    until(lambda: stub.beats["lease-g"] >= 2)
