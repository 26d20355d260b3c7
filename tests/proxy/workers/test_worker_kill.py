"""`kill -9` of a worker and of the control process under load: no turn that an agent saw is lost, no orphan is left."""

from __future__ import annotations

import threading
import time

from tests.fake_engine.settings import FakeSettings
from tests.proxy.conftest import StartFake, StartGateway
from tests.proxy.test_faults import wait_for
from tests.proxy.test_gateway_kill import Agent
from tests.proxy.workers.fleets import alive, kill_worker, worker_pids
from turngate.proxy import wire
from turngate.proxy.store.reader import StoreReader
from turngate.proxy.verify import verify_store

KILLS = 4


def test_killed_workers_and_a_killed_control_process_lose_no_turn_and_sessions_go_on(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    fake = start_fake(["Some words of an answer."], settings=FakeSettings(tokens_per_s=400.0))
    gateway = start_gateway(fake.url, "--workers", "2")
    stop = threading.Event()
    created = [gateway.session(group="g", group_size=4)[0] for _ in range(4)]
    agents = [Agent(one.base_url, stop, stream=i % 2 == 0) for i, one in enumerate(created)]
    for agent in agents:
        agent.start()
    try:
        for kill in range(KILLS):
            served(agents)
            if kill < KILLS - 1:
                before = worker_pids(gateway)
                kill_worker(gateway, before[kill % 2])
                assert wait_for(lambda before=before: len(set(worker_pids(gateway)) - set(before)) == 1)
            else:
                orphans = worker_pids(gateway)
                gateway.kill()
                assert wait_for(lambda orphans=orphans: not any(alive(pid) for pid in orphans))
                gateway.start()
        served(agents)
        gateway.client.finish_rollout(created[0].id, wire.FinishRollout(reward=1.0))
    finally:
        stop.set()
    for agent in agents:
        agent.join(timeout=60)
    for one in created[1:]:
        gateway.client.finish_rollout(one.id, wire.FinishRollout(reward=0.0))
    (group,) = gateway.client.lease(wire.NewLease(policy="policy")).groups
    assert all(rollout.rows for rollout in group.rollouts)
    gateway.stop()
    with StoreReader(gateway.store) as reader:
        stored = {turn.id for record in reader.rollouts() for turn in reader.turns(record.id)}
        sealed = {record.id: record.sealed_turns for record in reader.rollouts()}
        assert sealed == {record.id: len(reader.turns(record.id)) for record in reader.rollouts()}
    received = {turn for agent in agents for turn in agent.received}
    assert received <= stored
    assert verify_store(gateway.store).problems == []


def served(agents: list[Agent], turns: int = 3) -> None:
    """Wait until every agent has received so many answers more."""
    before = [len(agent.received) for agent in agents]
    deadline = time.monotonic() + 120
    while any(len(agent.received) < seen + turns for agent, seen in zip(agents, before, strict=True)):
        assert time.monotonic() < deadline, [agent.faults[-1:] for agent in agents]
        time.sleep(0.02)
