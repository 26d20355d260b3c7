"""A person's way through the viewer in a real Chromium: from the list to a rollout to one token."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn
from playwright.sync_api import Page, expect, sync_playwright

from tests.proxy.viewer.sample import HOSTILE, Sample, make_sample
from turngate.proxy.viewer.app import create_app
from turngate.proxy.viewer.reader import MemoryReader

pytestmark = pytest.mark.browser
ARGUMENTS = [
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-sync",
    "--disable-component-update",
]


@pytest.fixture(scope="module")
def sample() -> Sample:
    return make_sample(60)


@pytest.fixture(scope="module")
def reader(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> MemoryReader:
    return sample.reader(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def url(reader: MemoryReader) -> Iterator[str]:
    app = create_app(reader)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)


@pytest.fixture
def page() -> Iterator[Page]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.fail("no Chromium on PATH: install one (Debian: apt-get install chromium) to run the browser tests")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: faults.append(request.url) if "127.0.0.1" not in request.url else None)
        yield page
        browser.close()
        assert faults == []


def test_from_the_list_to_a_rollout_to_a_token(page: Page, url: str, sample: Sample) -> None:
    page.goto(url)
    page.get_by_label("task").select_option("python/fix-csv")
    page.wait_for_url("**/?task=python*")
    first = page.locator("td.task a").first
    expect(first).to_have_text("python/fix-csv")
    first.click()
    expect(page.locator("h1")).to_have_text("python/fix-csv")
    page.locator("article.exchange").first.get_by_role("link", name="tokens").click()

    rollout = page.url.split("/rollouts/")[1].split("/")[0]
    turn = sample.turns[rollout][0]
    chip = page.locator("[data-tokens] .t").nth(3)
    chip.click()
    panel = page.locator("[data-token]")
    expect(panel).to_contain_text(str(turn.completion_ids[3]))
    expect(panel).to_contain_text(f"{turn.logprobs[3]:.4f}")
    expect(panel.locator(".tops li")).to_have_count(4)
    page.keyboard.press("ArrowRight")
    expect(panel).to_contain_text(f"{turn.logprobs[4]:.4f}")


def test_the_keyboard_alone_reaches_a_turn_and_comes_back(page: Page, url: str) -> None:
    page.goto(url)
    for key in ("j", "j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/rollouts/*")
    rollout = page.url
    for key in ("j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/turns/0")
    page.keyboard.press("n")
    page.wait_for_url("**/turns/1")
    page.keyboard.press("u")
    page.wait_for_url(f"{rollout}#turn-1")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


def test_a_live_run_says_when_there_is_something_new(page: Page, url: str, reader: MemoryReader) -> None:
    page.goto(url)
    button = page.get_by_role("button", name="New turns")
    expect(button).to_be_hidden()
    reader.version[0] += 1
    expect(button).to_be_visible(timeout=30_000)


def test_on_a_narrow_screen_the_list_shows_task_outcome_and_reward_without_scrolling(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 390, "height": 3000})
    page.goto(url)
    row = page.locator("tr[data-row]").filter(has=page.locator("td.task")).first
    for column in ("td.task", "td:nth-child(6)", "td:nth-child(7)"):
        box = row.locator(column).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390, f"{column} ends at {box['x'] + box['width']}"
    expect(row.locator("td:nth-child(3)")).to_be_hidden()


def test_on_a_narrow_screen_the_chosen_token_is_in_sight(page: Page, url: str, sample: Sample) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{url}/rollouts/{sample.rollouts[0].id}/turns/0")
    page.locator("[data-tokens] .t").first.click()
    expect(page.get_by_role("heading", name="Token", exact=True)).to_be_in_viewport()
    page.get_by_role("button", name="close").click()
    expect(page.locator(".t.chosen")).to_have_count(0)


def test_hostile_text_stays_text(page: Page, url: str, sample: Sample) -> None:
    rollout = next(i.id for i in sample.rollouts if HOSTILE in str(sample.turns[i.id][-1].response))
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.goto(f"{url}/rollouts/{rollout}")
    expect(page.get_by_text(HOSTILE, exact=False).first).to_be_visible()
    assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize("width", [360, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_scrolls_sideways(page: Page, url: str, sample: Sample, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 900})
    info = next(info for info in sample.rollouts if info.turns > 5)
    group = str(info.group).replace("#", "%23")
    rollout = f"/rollouts/{info.id}"
    for path in ("/", f"/groups/{group}", rollout, f"{rollout}/turns/2", f"{rollout}/rows"):
        page.goto(url + path)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
