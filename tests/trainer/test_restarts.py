"""A part that dies is started again, on what it stands on; one that is of no use ends the run."""

from __future__ import annotations

import json

import pytest

from tests.trainer.launching import PATIENCE_S, Launch
from turngate.trainer.alarms import publication_alarm
from turngate.trainer.restarts import IN_VAIN, Lives, RestartSettings


def test_a_part_that_was_well_is_started_again_after_the_first_pause() -> None:
    lives = Lives(RestartSettings(pause_s=2.0, at_once=3))
    assert [lives.died(-9, 100.0).pause_s for _ in range(5)] == [2.0] * 5


def test_pauses_double_while_a_part_dies_at_once_and_then_the_run_ends() -> None:
    lives = Lives(RestartSettings(pause_s=2.0, longest_pause_s=5.0, at_once=4))
    assert [lives.died(1, well_s).pause_s for well_s in (None, 0.0, 29.0)] == [2.0, 4.0, 5.0]
    last = lives.died(1, None)
    assert last.pause_s is None
    assert "at once 4 times" in last.why


def test_a_part_that_was_well_in_between_has_not_died_at_once_in_a_row() -> None:
    lives = Lives(RestartSettings(at_once=2))
    assert all(lives.died(1, well_s).pause_s is not None for well_s in (0.0, 31.0, 0.0, 31.0, 0.0))


def test_the_limit_of_restarts_wrong_usage_and_training_in_vain_end_the_run() -> None:
    lives = Lives(RestartSettings(limit=1))
    assert lives.died(-9, 100.0).pause_s is not None
    assert "restarts.limit" in lives.died(-9, 100.0).why
    assert Lives(RestartSettings()).died(2, 100.0).pause_s is None
    assert "learns nothing" in Lives(RestartSettings()).died(IN_VAIN, 100.0).why
    assert Lives(RestartSettings(limit=0)).died(-9, 100.0).pause_s is None


def test_every_part_that_is_killed_is_started_again_where_it_was_and_the_run_ends_well(launch: Launch) -> None:
    process = launch.start(
        "fake.yaml", "train.steps=4", "restarts.pause_s=0.1", "restarts.at_once=9", FAKE_STEP_S="3", FAKE_RUN="children"
    )
    launch.until(launch.all_parts_run)
    before = launch.about()["parts"]
    for part in ("engine", "gateway", "runner", "trainer"):
        pid = launch.kill(part)
        launch.until(lambda part=part, pid=pid: launch.about()["parts"][part]["pid"] != pid)
    after = launch.about()["parts"]
    assert [part["port"] for part in after.values()] == [part["port"] for part in before.values()]
    assert {name: part["restarts"] for name, part in after.items()} == dict.fromkeys(before, 1)
    launch.until(lambda: len(launch.processes()) == 7)  # launcher, warden, 4 parts, the new runner's child
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert summary["restarts"] == {"engine": 1, "gateway": 1, "runner": 1, "trainer": 1}
    assert (summary["steps"], summary["groups_scheduled"]) == (4, 5)
    assert "was ended by SIGKILL" in out
    assert "trainer started again, restart 1" in out
    died = [(event["part"], event["code"]) for event in launch.events() if event["event"] == "died"]
    assert died == [("engine", -9), ("gateway", -9), ("runner", -9), ("trainer", -9)]
    assert launch.processes() == []


def test_a_part_waits_for_what_it_stands_on(launch: Launch) -> None:
    launch.start("fake.yaml", "restarts.pause_s=0.5", "restarts.at_once=9", FAKE_STEP_S="100")
    launch.until(launch.all_parts_run)
    for part in ("runner", "gateway", "engine"):
        launch.kill(part)
    launch.until(lambda: all(launch.about()["parts"][part]["restarts"] for part in ("runner", "gateway", "engine")))
    told = [(event["part"], event["event"]) for event in launch.events()]
    ready = max(place for place, entry in enumerate(told) if entry == ("engine", "ready"))
    for part in ("gateway", "runner"):
        assert max(place for place, entry in enumerate(told) if entry == (part, "started")) > ready


def test_a_part_that_dies_at_once_again_and_again_ends_the_run_with_its_last_words(launch: Launch) -> None:
    status, out, err = launch.run("fake.yaml", "restarts.pause_s=0.1", FAKE_TRAIN="die", FAKE_STEP_S="100")
    assert status == 1
    assert "the train broke its leg" in err
    assert "trainer is not started again: it died at once 3 times in a row" in err
    assert out.count("trainer started again") == 2
    assert launch.about()["state"] == "failed"
    assert launch.processes() == []


@pytest.mark.parametrize(("settled", "rings"), [({"publication failed": 1}, True), ({}, False), (None, False)])
def test_a_version_that_did_not_go_live_rings_an_alarm(settled: dict[str, int] | None, rings: bool) -> None:
    said = publication_alarm({"step": 7, "held_version": 5, "settled": settled})
    assert bool(said) == rings
    assert not rings or ("step 7" in said and "version 5" in said)


def test_the_launcher_shows_the_alarm_of_a_failed_publication_and_keeps_it(launch: Launch) -> None:
    status, out, err = launch.run("fake.yaml", "train.steps=3", FAKE_TRAIN="unpublished")
    assert status == 0, err
    assert out.count("ALARM publication: the weights of step 2 did not go live") == 2, "when it was seen and at the end"
    assert [event["text"][:11] for event in launch.events() if event["event"] == "alarm"] == ["publication"]


def test_what_a_runner_left_that_had_to_be_killed_is_removed(launch: Launch) -> None:
    left = launch.folder / "scratch" / "turngate-run-dead"
    left.mkdir(parents=True)
    (left / "owner.lock").touch()
    status, _, err = launch.run("fake.yaml", "run.scratch=scratch", FAKE_RUN="deaf")
    assert status == 0, err
    assert not left.exists()
