"""The viewer on the real store: what is written is shown, also while it is being written; the `view` command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from tests.proxy.viewer.sample import Sample, make_sample
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.viewer.app import create_app
from turngate.proxy.viewer.export import write_static
from turngate.proxy.viewer.index import build_index
from turngate.proxy.viewer.serve import view_command
from turngate.proxy.viewer.store_reader import StoreFolderReader
from turngate.proxy.wire import FinishRollout, NewRollout, RolloutInfo


class Writer:
    """Writes a sample's rollouts the way a gateway does."""

    def __init__(self, folder: Path, sample: Sample) -> None:
        self.sample = sample
        self.store = StoreFolder.create(folder, "sample-run", 1)
        self.control = ControlStore(self.store.control, run="sample-run")
        self.turns = [TurnStore(self.store.turns(worker)) for worker in range(2)]
        sample.tokenizer.save(str(self.store.tokenizer))
        for adapter in sample.adapters:
            self.control.allocate_version("demo", adapter.path, adapter.step, adapter.published_at_ns)
            self.control.set_adapter_state("demo", adapter.version, adapter.state)

    def write(self, number: int) -> RolloutInfo:
        """Write the rollout of this number, on a worker of its own."""
        info = self.sample.rollouts[number]
        new = NewRollout(
            task=info.task, group=info.group, group_size=6, harness=info.harness, policy="demo", metadata=info.metadata
        )
        secret = number.to_bytes(32, "big")
        self.control.create_rollout(info.id, secret, new, info.policy, info.version, info.created_at_ns)
        self.turns[number % 2].commit(self.sample.turns[info.id])
        if info.outcome is not None and info.finished_at_ns is not None:
            result = FinishRollout(
                reward=info.reward, rewards=info.rewards, metrics=info.metrics, outcome=info.outcome, cause=info.cause
            )
            self.control.finish_rollout(info.id, result, info.finished_at_ns)
        return info

    def close(self) -> None:
        self.control.close()
        for turns in self.turns:
            turns.close()


@cache
def _sample() -> Sample:
    return make_sample(18)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    made = Writer(tmp_path / "run" / "store", _sample())
    yield made
    made.close()


@pytest.fixture
def reader(writer: Writer) -> Iterator[StoreFolderReader]:
    for number in range(12):
        writer.write(number)
    made = StoreFolderReader(writer.store.path.parent)
    yield made
    made.close()


def test_what_was_written_is_read_back(writer: Writer, reader: StoreFolderReader) -> None:
    shown = {info.id: info for info in reader.rollouts()}
    assert shown == {info.id: info for info in writer.sample.rollouts[:12]}
    for info in writer.sample.rollouts[:12]:
        assert [t.id for t in reader.turns(info.id)] == [t.id for t in writer.sample.turns[info.id]]
    assert [a.version for a in reader.adapters()] == [1, 2, 3, 4, 5]


def test_counts_follow_a_store_that_is_being_written(writer: Writer, reader: StoreFolderReader) -> None:
    before, state = build_index(reader).summary, reader.state()
    assert reader.state() == state
    added = writer.write(12)
    assert reader.state() != state
    after = build_index(reader).summary
    assert after.rollouts == before.rollouts + 1
    assert after.turns == before.turns + added.turns
    assert after.completion_tokens == before.completion_tokens + added.completion_tokens
    assert after == build_index(StoreFolderReader(writer.store.path)).summary


async def test_pages_of_a_real_store_answer(writer: Writer, reader: StoreFolderReader) -> None:
    info = writer.sample.rollouts[3]
    transport = httpx.ASGITransport(app=create_app(reader))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as web:
        for path in ("/", f"/rollouts/{info.id}", f"/rollouts/{info.id}/turns/0", f"/rollouts/{info.id}/rows"):
            assert (await web.get(path)).status_code == 200, path
        assert (await web.get(f"/groups/{quote(str(info.group))}")).status_code == 200


async def test_static_files_link_only_to_each_other(writer: Writer, reader: StoreFolderReader, tmp_path: Path) -> None:
    info = writer.sample.rollouts[3]
    files = await write_static(create_app(reader), reader, info.id, tmp_path / "out")
    pages = list((tmp_path / "out").glob("*.html"))
    assert len(pages) == info.turns + 2
    assert files > len(pages)
    for page in pages:
        for link in re.findall(r'(?:href|src)="([^"]*)"', page.read_text()):
            path = link.partition("#")[0].partition("?")[0]
            assert not link.startswith("/")
            assert path == "" or (tmp_path / "out" / path).exists(), link


def test_the_command_serves_until_it_is_interrupted(writer: Writer) -> None:
    writer.write(0)
    command = [sys.executable, "-m", "turngate.proxy.cli", "view", str(writer.store.path), "--port", "0"]
    with subprocess.Popen([*command, "--no-browser"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
            assert url is not None
            assert httpx.get(url.group(), trust_env=False).status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(("name", "says"), [("nothing", "neither a store"), ("empty", "neither a store")])
def test_a_folder_that_is_no_store_is_refused_with_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert view_command([str(tmp_path / name)]) == 2
    assert says in capsys.readouterr().err


def test_usage_errors_have_status_two(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        view_command([str(tmp_path), "--static", "out"])
    assert stopped.value.code == 2
