"""Tails: what is rendered behind a stub is what the whole rendering has there, or nothing is spliced."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proxy import templates
from tests.proxy.templates import ToyRenderer
from turngate.proxy.splice import HistoryIndex
from turngate.proxy.tail import StubCounts, TailError, TemplateFacts, append_break, render_tail, tool_call
from turngate.proxy.template_probe import probe_template

TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
APPENDING = [templates.PLAIN, templates.GROUPS_RESULTS, templates.DROPS_REASONING]
ids = ["plain", "groups results", "drops reasoning"]


async def test_an_unspliceable_tail_is_refused() -> None:
    with pytest.raises(TailError, match="render whole prompts"):
        await render_tail(ToyRenderer(templates.PLAIN), TemplateFacts(), [{"role": "user", "content": "x"}], None)
    facts = await probe_template(ToyRenderer(templates.PLAIN))
    with pytest.raises(TailError):
        await render_tail(ToyRenderer(templates.PLAIN), facts, [], None)


async def test_a_cut_turn_gets_its_end_first() -> None:
    render = ToyRenderer(templates.PLAIN)
    facts = await probe_template(render)
    new = [{"role": "user", "content": "go on"}]
    whole = await render_tail(render, facts, new, None)
    cut = await render_tail(render, facts, new, None, cut=True)
    assert cut.tolist() == [render.end, *whole.tolist()]


async def test_tools_travel_with_the_stub_only_where_they_matter() -> None:
    render = ToyRenderer(templates.PLAIN)
    facts = await probe_template(render)
    render.bodies.clear()
    await render_tail(render, facts, [{"role": "user", "content": "x"}], TOOLS, template_kwargs={"a": 1})
    assert all("tools" not in body and body["chat_template_kwargs"] == {"a": 1} for body in render.bodies)


async def test_the_stub_calls_what_the_recorded_turn_called() -> None:
    render = ToyRenderer(templates.GROUPS_RESULTS)
    facts = await probe_template(render)
    answer = {"role": "assistant", "content": "", "tool_calls": [tool_call("call_1", "bash", '{"a": 1}')]}
    render.bodies.clear()
    await render_tail(render, facts, [{"role": "tool", "tool_call_id": "call1", "content": "x"}], None, response=answer)
    assert render.bodies[0]["messages"][-1]["tool_calls"] == [tool_call("call1", "bash", "{}")]


async def test_a_stub_is_rendered_alone_only_once_for_the_same_tools_names_and_options() -> None:
    render = ToyRenderer(templates.GROUPS_RESULTS)
    facts = await probe_template(render)
    stubs = StubCounts()

    async def renders(call_id: str, name: str, context: object = None) -> int:
        answer = {"role": "assistant", "content": "", "tool_calls": [tool_call(call_id, name, "{}")]}
        new = [{"role": "tool", "tool_call_id": call_id, "content": "x"}]
        expected = await render_tail(render, facts, new, None, response=answer)
        render.bodies.clear()
        tail = await render_tail(render, facts, new, None, response=answer, stubs=stubs, context=context)
        assert tail.tolist() == expected.tolist()
        return len(render.bodies)

    assert [await renders("call1", "bash"), await renders("call2", "bash")] == [2, 1]
    assert [await renders("call1", "read"), await renders("call1", "bash", {"documents": []})] == [2, 2]
    assert [await renders("a<end>", "bash"), await renders("a<end>", "bash")] == [2, 2]


# -- properties ---------------------------------------------------------------------------------------------------

words = st.lists(st.sampled_from(["fix", "it", "<end>", "\n", "<assistant>", " ", "<user>", "7", "</s>"]), max_size=6)
texts = words.map("".join)


_PROBED: dict[str, tuple[ToyRenderer, TemplateFacts]] = {}


@st.composite
def turns_and_news(draw: st.DrawFn) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """A head, an assistant answer and new messages, with special tokens inside the texts."""
    calls = draw(st.integers(0, 2))
    answer: dict[str, Any] = {"role": "assistant", "content": "done"}
    new = []
    if calls:
        answer["tool_calls"] = [tool_call(f"c{n}", "bash", '{"x": "last"}') for n in range(calls)]
        new = [{"role": "tool", "tool_call_id": f"c{n}", "content": draw(texts)} for n in range(calls)]
    for _ in range(draw(st.integers(0 if calls else 1, 2))):
        new.append({"role": "user", "content": draw(texts)})
    head = [{"role": "user", "content": draw(texts)}]
    if draw(st.booleans()):
        head = [{"role": "system", "content": draw(texts)}, *head]
    return head, answer, new


@pytest.mark.parametrize("template", APPENDING, ids=ids)
@settings(deadline=None, max_examples=60)
@given(case=turns_and_news(), tools=st.booleans())
async def test_recorded_tokens_and_a_tail_are_the_whole_rendering(template: str, case: Any, tools: bool) -> None:
    head, answer, new = case
    if template not in _PROBED:
        _PROBED[template] = ToyRenderer(template), await probe_template(ToyRenderer(template))
    render, facts = _PROBED[template]
    offered = TOOLS if tools else None
    tail = await render_tail(render, facts, new, offered, response=answer)
    prompt = await render({"messages": head, "tools": offered})
    whole = await render({"messages": [*head, answer, *new], "tools": offered})
    sampled = whole[len(prompt) : len(whole) - len(tail)]
    said = render.text({"messages": [answer], "add_generation_prompt": False})
    said = said.split("<assistant>", 1)[1].split("</think>")[-1].removesuffix("\n")
    assert whole == [*prompt, *render.encode(said), *tail]
    assert sampled[-1] == render.end


# -- faithful histories -------------------------------------------------------------------------------------------

ASK = {"role": "user", "content": "Fix it."}
FACTS = TemplateFacts(end_of_turn=1, end_of_call=1, splices=True, splices_tools=True, drops_earlier_reasoning=True)


def planned(answer: dict[str, Any], new: list[dict[str, Any]]) -> tuple[HistoryIndex, Any]:
    index = HistoryIndex()
    index.record("t0", index.plan([ASK], TOOLS), answer, TOOLS)
    return index, index.plan([ASK, answer, *new], TOOLS)


CALL = {"role": "assistant", "content": "", "tool_calls": [tool_call("c0", "bash", "{}")]}
RESULT = {"role": "tool", "tool_call_id": "c0", "content": "ok"}


@pytest.mark.parametrize(
    ("answer", "new", "breaks"),
    [
        ({**CALL, "reasoning": "hm"}, [RESULT], False),
        ({**CALL, "reasoning": "hm"}, [RESULT, ASK], True),
        ({"role": "assistant", "content": "a", "reasoning_content": "hm"}, [ASK], True),
        ({"role": "assistant", "content": "a", "reasoning_content": ""}, [ASK], False),
        ({"role": "assistant", "content": "<think>x</think>a"}, [ASK], False),
    ],
)
def test_reasoning_that_the_template_would_drop_breaks(answer: Any, new: Any, breaks: bool) -> None:
    index, plan = planned(answer, new)
    assert append_break(FACTS, index, plan) == ("template_drops_reasoning" if breaks else None)


def test_only_a_continuation_can_drop_reasoning() -> None:
    index, _ = planned({**CALL, "reasoning": "hm"}, [RESULT])
    assert append_break(FACTS, index, index.plan([{"role": "user", "content": "New."}], TOOLS)) is None
