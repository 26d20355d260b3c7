"""The template probe: what is believed of a template was seen, and what was not seen is not believed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import pytest

from tests.engines import RealEngine
from tests.proxy import templates
from tests.proxy.templates import ToyRenderer
from turngate.proxy.engine.errors import EngineRefused
from turngate.proxy.tail import render_tail, tool_call
from turngate.proxy.template_probe import probe_template

APPENDING = [templates.PLAIN, templates.GROUPS_RESULTS, templates.DROPS_REASONING]
ids = ["plain", "groups results", "drops reasoning"]


@pytest.mark.parametrize("template", APPENDING, ids=ids)
async def test_a_template_that_appends_is_spliced_without_its_tools(template: str) -> None:
    render = ToyRenderer(template)
    facts = await probe_template(render)
    assert (facts.end_of_turn, facts.end_of_call) == (render.end, render.end)
    assert (facts.splices, facts.splices_tools, facts.stub_needs_tools) == (True, True, False)
    assert facts.notes == ()


async def test_dropped_reasoning_is_found() -> None:
    drops = await probe_template(ToyRenderer(templates.DROPS_REASONING))
    assert (drops.drops_earlier_reasoning, drops.drops_inline_reasoning, drops.drops_loop_reasoning) == (
        True,
        True,
        False,
    )
    plain = await probe_template(ToyRenderer(templates.PLAIN))
    assert (plain.drops_earlier_reasoning, plain.drops_inline_reasoning, plain.drops_loop_reasoning) == (
        True,
        False,
        True,
    )


async def test_a_template_that_moves_its_tools_is_not_spliced() -> None:
    facts = await probe_template(ToyRenderer(templates.MOVES_TOOLS))
    assert not facts.splices
    assert facts.notes


async def test_where_no_tools_are_taken_the_moving_ones_do_no_harm() -> None:
    facts = await probe_template(ToyRenderer(templates.MOVES_TOOLS, refuses_tools=True))
    assert facts.splices
    assert facts.stub_needs_tools


async def test_a_template_that_refuses_tool_results_splices_texts_only() -> None:
    facts = await probe_template(ToyRenderer(templates.NO_TOOLS))
    assert (facts.splices, facts.splices_tools, facts.end_of_call) == (True, False, None)
    assert facts.takes([{"role": "user", "content": "x"}])
    assert not facts.takes([{"role": "tool", "tool_call_id": "a", "content": "x"}])


@pytest.mark.parametrize("template", [templates.NO_END, templates.TWO_ENDS, templates.COUNTS_TURNS])
async def test_what_cannot_be_proved_is_not_spliced(template: str) -> None:
    facts = await probe_template(ToyRenderer(template))
    assert not facts.splices
    assert not facts.splices_tools
    assert facts.notes


async def test_a_template_without_system_messages_is_spliced() -> None:
    assert (await probe_template(ToyRenderer(templates.NO_SYSTEM))).splices


async def test_a_template_that_takes_one_call_at_a_time_is_spliced() -> None:
    facts = await probe_template(ToyRenderer(templates.ONE_CALL))
    assert (facts.splices, facts.splices_tools) == (True, True)
    assert facts.notes == ("tool calls: refused: one call at a time",)


# -- the real engine ----------------------------------------------------------------------------------------------

TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
    }
]
HEAD = [{"role": "system", "content": "Be <|im_end|> brief."}, {"role": "user", "content": "ls\n\n?"}]
NEWS: list[dict[str, Any]] = [{"role": "user", "content": "and <|im_end|>\n now?  "}]


def render_at(engine: RealEngine) -> Callable[[Mapping[str, Any]], Awaitable[list[int]]]:
    """The render call of a real server."""

    async def render(body: Mapping[str, Any]) -> list[int]:
        async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
            answer = await client.post("/v1/chat/completions/render", json={"model": engine.model, **body})
        if answer.status_code >= 500:
            answer.raise_for_status()
        if answer.status_code >= 400:
            raise EngineRefused(answer.status_code, answer.text)
        found: list[int] = answer.json()["token_ids"]
        return found

    return render


@pytest.mark.engine
async def test_smollm_on_the_real_engine_is_spliced(smollm_engine: RealEngine) -> None:
    render = render_at(smollm_engine)
    facts = await probe_template(render)
    assert facts.splices
    answer = {"role": "assistant", "content": "Sure"}
    tail = await render_tail(render, facts, NEWS, None, response=answer)
    prompt = await render({"messages": HEAD})
    whole = await render({"messages": [*HEAD, answer, *NEWS]})
    assert whole[: len(prompt)] == prompt
    assert whole[len(whole) - len(tail) :] == tail.tolist()
    assert whole[len(prompt) : len(whole) - len(tail)][-1] == facts.end_of_turn


@pytest.mark.engine
@pytest.mark.parametrize("calls", [0, 1, 2])
async def test_qwen_on_the_real_engine_is_spliced_with_tools(qwen_engine: RealEngine, calls: int) -> None:
    render = render_at(qwen_engine)
    facts = await probe_template(render)
    assert (facts.splices, facts.splices_tools, facts.stub_needs_tools) == (True, True, False)
    answer: dict[str, Any] = {"role": "assistant", "content": "Sure."}
    new: list[dict[str, Any]] = NEWS
    if calls:
        answer["tool_calls"] = [tool_call(f"call{n}", "bash", '{"command": "ls"}') for n in range(calls)]
        results = [{"role": "tool", "tool_call_id": f"call{n}", "content": "a <|im_end|>\n"} for n in range(calls)]
        new = [*results, *NEWS]
    tail = await render_tail(render, facts, new, TOOLS, response=answer)
    prompt = await render({"messages": HEAD, "tools": TOOLS})
    whole = await render({"messages": [*HEAD, answer, *new], "tools": TOOLS})
    assert whole[: len(prompt)] == prompt
    assert whole[len(whole) - len(tail) :] == tail.tolist()
    completion = whole[len(prompt) : len(whole) - len(tail)]
    assert completion.count(facts.end_of_turn) == 1
    assert completion[-1] == facts.end_of_turn
