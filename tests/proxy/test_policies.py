"""Adapter versions through the gateway: loaded, routed to without a pause, unloaded when no turn can name them."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.fake_engine.settings import FakeSettings
from tests.proxy.conftest import StartFake, StartGateway
from turngate.proxy import wire
from turngate.proxy.client import GatewayError
from turngate.proxy.store.control import ControlStore


@pytest.fixture
def lora(tmp_path: Path) -> str:
    """A folder that looks like a LoRA."""
    folder = tmp_path / "lora"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def say(client: object) -> None:
    client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])  # type: ignore[attr-defined]


def publish(gateway: object, path: str, step: int = 1) -> wire.AdapterInfo:
    new = wire.PublishAdapter(policy="policy", path=path, step=step)
    info: wire.AdapterInfo = gateway.client.publish_adapter(new)  # type: ignore[attr-defined]
    return info


def test_sessions_stay_on_their_version_and_new_ones_get_the_newest(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."])
    gateway = start_gateway(fake.url)
    old, old_client = gateway.session()
    first = publish(gateway, lora)
    new, new_client = gateway.session()
    follower, follower_client = gateway.session(pin="turn")
    second = publish(gateway, lora)
    for client in (old_client, new_client, follower_client):
        say(client)
    asked = [body["model"] for body in fake.seen("/inference/v1/generate")[-3:]]
    assert asked == ["fake", first.name, second.name]
    assert (old.version, new.version, follower.version) == (0, 1, 1)
    assert first.name == "policy-test-v1"
    assert gateway.client.policy("policy").version == 2


def test_a_render_server_of_its_own_is_asked_for_the_base_whatever_adapter_samples(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake, render = (
        start_fake(["Fine."]),
        start_fake(settings=FakeSettings(runtime_lora=False)),
    )  # as `vllm launch render`: it has no adapters
    gateway = start_gateway(fake.url, "--render", render.url)
    first = publish(gateway, lora)
    _, client = gateway.session()
    for _ in range(2):
        say(client)
    with client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}], stream=True) as events:
        assert "".join(event.choices[0].delta.content or "" for event in events if event.choices) == "Fine."
    assert {body["model"] for body in fake.seen("/inference/v1/generate")[-3:]} == {first.name}
    for path in ("/v1/chat/completions/render", "/v1/chat/completions/derender"):
        assert {body.get("model", "fake") for body in render.seen(path)} == {"fake"}
        assert {body["chat_request"].get("model") for body in render.seen(path) if "chat_request" in body} <= {"fake"}


def test_a_version_is_unloaded_when_its_last_rollout_ends(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."])
    gateway = start_gateway(fake.url)
    first = publish(gateway, lora)
    pinned, _ = gateway.session()
    publish(gateway, lora)
    assert first.name in fake.engine.adapters
    gateway.client.finish_rollout(pinned.id, wire.FinishRollout(reward=1.0))
    assert first.name not in fake.engine.adapters
    assert [live.version for live in gateway.client.policy("policy").live] == [2]


def test_live_versions_stay_below_the_engines_limit_by_cancelling_the_oldest_rollouts(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."], settings=FakeSettings(max_loras=2))
    gateway = start_gateway(fake.url, "--max-live-versions", "2")
    publish(gateway, lora)
    oldest, _ = gateway.session()
    follower, follower_client = gateway.session(pin="turn")
    publish(gateway, lora)
    kept, kept_client = gateway.session()
    publish(gateway, lora)
    assert gateway.client.rollout(oldest.id).cause == "version_retired"
    assert gateway.client.rollout(kept.id).state == "open"
    assert gateway.client.rollout(follower.id).state == "open", "it follows the newest, so no version is its own"
    say(kept_client)
    say(follower_client)
    assert len(fake.engine.adapters) == 2


def test_whatever_is_open_never_more_versions_are_loaded_than_the_engine_has_places(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."], settings=FakeSettings(max_loras=3))
    gateway = start_gateway(fake.url)
    followers = [gateway.session(pin="turn")[1]]
    for step in range(1, 7):
        publish(gateway, lora, step)
        gateway.session()
        evaluated, _ = gateway.session(training=False, version=gateway.client.policy("policy").version)
        if step % 3:
            gateway.client.finish_rollout(evaluated.id, wire.FinishRollout(reward=1.0))
        for client in followers:
            say(client)
        live = gateway.client.policy("policy").live
        assert {one.name for one in live} == fake.engine.adapters.keys()
        assert step in {one.step for one in live}
    assert fake.engine.most_adapters == 2, "one of the three places stays empty: turns would queue for it"


def test_a_gateway_restarted_before_an_engine_with_fewer_places_keeps_the_newest_versions(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."], settings=FakeSettings(max_loras=4))
    gateway = start_gateway(fake.url)
    opened = []
    for step in (1, 2, 3):
        publish(gateway, lora, step)
        opened.append(gateway.session())
    assert len(fake.engine.adapters) == 3
    gateway.kill()
    fake.stop()
    smaller = start_fake(["Fine."], port=fake.port, settings=FakeSettings(max_loras=2))
    gateway.start()
    assert smaller.engine.most_adapters == 1
    assert [one.version for one in gateway.client.policy("policy").live] == [3]
    assert gateway.client.policy("policy").version == 3
    assert [gateway.client.rollout(created.id).cause for created, _ in opened] == ["version_retired"] * 2 + [None]
    say(opened[2][1])
    assert publish(gateway, lora, 4).version == 4
    assert smaller.engine.most_adapters == 1


def test_a_failed_load_keeps_the_old_version_and_its_number_is_never_used_again(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."], settings=FakeSettings(runtime_lora=False))
    gateway = start_gateway(fake.url)
    with pytest.raises(GatewayError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        publish(gateway, lora)
    assert gateway.client.policy("policy").version == 0
    gateway.kill()
    gateway.start()
    with pytest.raises(GatewayError, match="version 2 of policy could not be loaded"):
        publish(gateway, lora)
    key = {"authorization": f"Bearer {(gateway.store / 'admin.key').read_text().strip()}"}
    states = [(a["version"], a["state"]) for a in httpx.get(f"{gateway.url}/adapters", headers=key).json()]
    assert states == [(1, "failed"), (2, "failed")]


def test_no_turn_is_routed_to_a_version_that_a_replica_has_not_confirmed(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    quick, slow = start_fake(["Fine."]), start_fake(["Fine."], settings=FakeSettings(load_s=3.0))
    gateway = start_gateway(f"{quick.url}", "--engine", slow.url)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(publish, gateway, lora)
        while not quick.engine.adapters:
            assert not publishing.done()
            time.sleep(0.02)
        early, client = gateway.session()
        follower, follower_client = gateway.session(pin="turn")
        say(client)
        say(follower_client)
        assert not publishing.done(), "the turns were to come before the second replica has the version"
        first = publishing.result()
    later, _ = gateway.session()
    assert (early.version, follower.version, later.version) == (0, 0, 1)
    asked = {body.get("model") for fake in (quick, slow) for body in fake.seen("/inference/v1/generate")}
    assert first.name not in asked
    assert all(first.name in fake.engine.adapters for fake in (quick, slow))


def test_a_version_that_one_of_two_replicas_refuses_is_nowhere_and_turns_go_on(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    good, bad = start_fake(["Fine."]), start_fake(["Fine."], settings=FakeSettings(runtime_lora=False))
    gateway = start_gateway(good.url, "--engine", bad.url)
    with pytest.raises(GatewayError, match="0 stays current"):
        publish(gateway, lora)
    assert not good.engine.adapters
    created, client = gateway.session()
    say(client)
    assert created.version == gateway.client.policy("policy").version == 0


def test_while_no_engine_is_there_a_publication_takes_no_version_and_may_be_asked_again(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."])
    gateway = start_gateway(fake.url)
    fake.stop()
    for _ in range(3):
        with pytest.raises(GatewayError) as away:
            publish(gateway, lora)
        assert away.value.status == 503
    assert "no engine answers now" in str(away.value)
    taken = gateway.client.adapters("policy")
    assert [info.state for info in taken] in ([], ["failed"]), "only the one that found out may have cost a version"
    again = start_fake(["Fine."], port=fake.port)
    info = None
    while info is None:
        with contextlib.suppress(GatewayError):
            info = publish(gateway, lora)
    assert list(again.engine.adapters) == [info.name]


def test_rollouts_that_can_no_longer_be_trained_are_cancelled_at_the_publication_that_makes_them_so(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    gateway = start_gateway(start_fake(["Fine."], settings=FakeSettings(max_loras=8)).url)
    base, base_client = gateway.session(group="g", group_size=2)
    follower, _ = gateway.session(pin="turn")
    evaluated, _ = gateway.session(training=False)
    new = wire.PublishAdapter(policy="policy", path=lora, step=1, max_staleness=1)
    gateway.client.publish_adapter(new)
    kept, _ = gateway.session()
    assert gateway.client.rollout(base.id).state == "open", "one version behind is not too old"
    gateway.client.publish_adapter(new)
    gone = gateway.client.rollout(base.id)
    assert (gone.outcome, gone.cause) == ("cancelled", "stale")
    assert [gateway.client.rollout(one.id).state for one in (follower, evaluated, kept)] == ["open"] * 3
    with pytest.raises(openai.APIStatusError) as refused:
        say(base_client)
    assert refused.value.status_code == 410


def test_a_restarted_gateway_loads_what_was_live_and_sessions_go_on(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."])
    gateway = start_gateway(fake.url)
    first = publish(gateway, lora)
    created, client = gateway.session()
    say(client)
    gateway.kill()
    fake.engine.adapters.clear()
    gateway.start()
    assert first.name in fake.engine.adapters
    say(client)
    assert gateway.client.rollout(created.id).turns == 2
    assert publish(gateway, lora).version == 2


def test_a_gateway_killed_while_loading_or_before_unloading_leaves_no_adapter_on_the_engine(
    start_fake: StartFake, start_gateway: StartGateway, lora: str
) -> None:
    fake = start_fake(["Fine."])
    gateway = start_gateway(fake.url)
    publish(gateway, lora)
    pinned, _ = gateway.session()
    current = publish(gateway, lora)
    assert len(fake.engine.adapters) == 2
    gateway.kill()
    with ControlStore(gateway.store / "control.sqlite") as store:
        store.finish_rollout(pinned.id, wire.FinishRollout(reward=1.0), pinned_at := time.time_ns())
        _, loading = store.allocate_version("policy", lora, 3, pinned_at)
    fake.engine.adapters[loading] = lora
    gateway.start()
    assert list(fake.engine.adapters) == [current.name]
    assert [live.version for live in gateway.client.policy("policy").live] == [2]
    assert [info.state for info in gateway.client.adapters("policy")] == ["retired", "live", "failed"]


def test_a_folder_without_an_adapter_is_refused(start_fake: StartFake, start_gateway: StartGateway) -> None:
    gateway = start_gateway(start_fake(["x"]).url)
    with pytest.raises(GatewayError, match=r"adapter_config\.json"):
        publish(gateway, "/nowhere")
    assert gateway.client.policy("policy").version == 0


def test_rollouts_left_open_are_listed_for_whoever_takes_over(
    start_fake: StartFake, start_gateway: StartGateway
) -> None:
    gateway = start_gateway(start_fake(["x"]).url)
    done, _ = gateway.session()
    left, _ = gateway.session()
    gateway.client.finish_rollout(done.id, wire.FinishRollout(reward=1.0))
    assert [rollout.id for rollout in gateway.client.open_rollouts()] == [left.id]
