"""Exact tokens: whatever the model sampled is recorded, no more and no less, with its log-probs."""

from __future__ import annotations

import math

import pytest

from tests.conformance.answers import Session, chat
from tests.conformance.engines import Engine
from tests.conformance.targets import NotOffered, Row, Target
from tests.conformance.wanted import HI, TOOLS, Says, calling, ended, then

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def only(target: Target, session: Session) -> tuple[Row, list[int]]:
    """The one row of a session with one turn, and what it has sampled; log-probs are sound."""
    (row,) = target.rows(session)
    (sampled,) = row.completions
    trained = [value for value, mask in zip(row.logprobs, row.mask, strict=True) if mask]
    assert all(math.isfinite(value) and value <= 1e-3 for value in trained), "a log-prob is not one"
    assert len(row.ids) > len(sampled), "there is no prompt before the sampled tokens"
    return row, sampled


def test_token_ids_lost_while_tool_calls_stream(target: Target, says: Says) -> None:
    said = calling({"cmd": "ls -la"}, {"cmd": "cat a"}, content="Looking.")
    says([said])
    session = target.session()
    answer = chat(session, HI, stream=True, tools=TOOLS)
    assert len(answer.choice.calls) == 2, "the calls did not arrive"
    text = says.text(only(target, session)[1])
    whole = text.startswith("Looking.") and text.count("</tool_call>") == 2 and text.endswith("<|im_end|>")
    assert whole, f"the ids say {text!r}"


@STREAMED
def test_ids_dropped_by_reasoning_parser(target: Target, says: Says, stream: bool) -> None:
    says(["<think>First I look around.</think>The answer is four."])
    session = target.session()
    answer = chat(session, HI, stream=stream, chat_template_kwargs={"enable_thinking": True})
    assert answer.choice.content.strip() == "The answer is four.", f"the content is {answer.choice.content!r}"
    wanted = ended("<think>First I look around.</think>The answer is four.")
    assert says.text(only(target, session)[1]) == wanted, "the ids lack a part"


@STREAMED
@pytest.mark.parametrize("stop", [None, "STOP"], ids=["end-of-turn", "stop-string"])
def test_matched_stop_token_missing(target: Target, says: Says, stream: bool, stop: str | None) -> None:
    says(["One two. STOP and more."])
    session = target.session()
    answer = chat(session, HI, stream=stream, stop=[stop] if stop else None)
    assert answer.choice.finish_reason == "stop"
    assert ("STOP" in answer.choice.content) == (stop is None), f"the content is {answer.choice.content!r}"
    text = says.text(only(target, session)[1])
    assert (stop or "<|im_end|>") in text, f"the ids say {text!r}"


@STREAMED
def test_eos_off_by_one(target: Target, says: Says, stream: bool) -> None:
    says(["Well done, all of it."])
    for limit, reason in ((None, "stop"), (3, "length")):
        session = target.session()
        wish = {"max_tokens": limit} if limit else {}
        answer = chat(session, HI, stream=stream, stream_options={"include_usage": True} if stream else None, **wish)
        assert answer.choice.finish_reason == reason
        _, sampled = only(target, session)
        assert (answer.usage or {}).get("completion_tokens") == len(sampled), "usage and ids differ"
        assert says.text(sampled).endswith("<|im_end|>") == (reason == "stop"), f"the ids say {says.text(sampled)!r}"
        assert limit is None or len(sampled) == limit


def test_earlier_thinking_stripped_by_template(target: Target, says: Says, engine: Engine) -> None:
    if target.name == "vllm":
        raise NotOffered("no record of a conversation")
    first = "<think>Thinking hard.</think>One."
    says([first, "<think>Again.</think>Two."])
    session = target.session()
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = chat(session, HI, **kwargs)
    assert answer.choice.content.strip() == "One."
    chat(session, [*HI, *then({"role": "assistant", "content": "One."})], **kwargs)
    said = sorted(says.text(one) for row in target.rows(session) for one in row.completions)
    assert said == sorted([ended(first), ended("<think>Again.</think>Two.")]), f"what is trained says {said}"


def test_missing_prompt_ids_taken_as_empty(target: Target, says: Says, engine: Engine) -> None:
    if target.name == "vllm":
        raise NotOffered("it is the engine itself")
    says(["Hello."])
    session = target.session()
    engine.relay.lose_prompt_ids = True
    answer = chat(session, HI)
    engine.relay.lose_prompt_ids = False
    assert answer.status in (200, 502, 503), f"HTTP {answer.status}"
    assert [row for row in target.rows(session) if any(row.mask)] == [], "tokens without their prompt are trained"


def test_client_logprobs_false_defeats_capture(target: Target, says: Says) -> None:
    if target.name == "vllm":
        raise NotOffered("an answer has what its request asked for")
    says(["Hello there."])
    session = target.session()
    assert chat(session, HI, logprobs=False).choice.content == "Hello there."
    assert says.text(only(target, session)[1]) == ended("Hello there."), "what is trained is not what was said"


def test_client_temperature_silently_kept(target: Target, says: Says, engine: Engine) -> None:
    says(["Hello."])
    session = target.session(temperature=0.9)
    assert chat(session, HI, temperature=0.2).status == 200
    _, body = engine.relay.asked[-1]
    used = body.get("sampling_params", body).get("temperature")
    assert used == 0.9, f"the engine was asked for temperature {used}, the policy is 0.9"
