"""Every value of a wrong type or size at every place of every dialect's body: an ask, or a refusal in words.

Parsing is pure, so all of them can be tried; `test_fuzz_bodies` sends a few to a running gateway. What these bodies
hold is meant to be everything that the dialects look at: a new field belongs here, too.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from tests.proxy.test_fuzz_bodies import places, replaced
from turngate.proxy.dialects.base import Dialect
from turngate.proxy.dialects.chat import Chat
from turngate.proxy.dialects.gemini import Gemini
from turngate.proxy.dialects.messages import Messages
from turngate.proxy.dialects.responses import Responses
from turngate.proxy.errors import BadRequest
from turngate.proxy.reattach import Marks, retry_key
from turngate.proxy.splice import HistoryIndex

_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA}

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "hi", "name": "n"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning": "r",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ],
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    "stream_options": {"include_usage": True},
    "stream": True,
    "max_tokens": 4,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "temperature": 1,
    "top_k": 3,
    "n": 1,
    "bad_words": ["w"],
    "stop_token_ids": [1],
    "min_tokens": 1,
    "ignore_eos": False,
    "seed": 3,
    "logprobs": True,
    "chat_template_kwargs": {"a": 1},
    "metadata": {"a": "b"},
    "reasoning_effort": "low",
    "top_logprobs": 2,
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "d"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "ho"},
                {"type": "tool_use", "id": "a", "name": "f", "input": {"a": "b"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [{"type": "text", "text": "r"}],
                    "is_error": True,
                },
                {"type": "image", "source": {"type": "url", "url": "u"}},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": _SCHEMA}, {"type": "web_search_1", "name": "web"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}, "effort": "low"},
    "max_tokens": 4,
    "stop_sequences": ["x"],
    "stream": False,
    "temperature": 1,
    "top_p": 1,
    "top_k": 3,
    "metadata": {"user_id": "u"},
    "unknown": {"a": 1},
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "i",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "t"}],
            "encrypted_content": "x",
        },
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": "x"},
    ],
    "tools": [
        {"type": "function", **_FUNCTION, "strict": False},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", **_FUNCTION}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 16,
    "stream": True,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "parallel_tool_calls": True,
    "temperature": 1,
    "top_p": 1,
    "truncation": "disabled",
    "metadata": {"a": "b"},
}
GEMINI: dict[str, Any] = {
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}]},
        {
            "role": "model",
            "parts": [{"text": "t", "thought": True}, {"functionCall": {"name": "f", "args": {"a": "b"}}}],
        },
        {"role": "user", "parts": [{"functionResponse": {"id": "x", "name": "f", "response": {"output": 1}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "s"}]},
    "tools": [{"functionDeclarations": [_FUNCTION]}, {"googleSearch": {}}],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": []}},
    "generationConfig": {
        "temperature": 1,
        "topP": 1,
        "topK": 3,
        "maxOutputTokens": "4",
        "seed": 3,
        "candidateCount": 1,
        "stopSequences": ["x"],
        "responseMimeType": "application/json",
        "responseSchema": {"minItems": "1"},
        "thinkingConfig": {"thinkingBudget": 5, "includeThoughts": True},
    },
    "safetySettings": [{"category": "c", "threshold": "t"}],
}
BODIES: list[tuple[Dialect, dict[str, Any]]] = [
    (Chat(), CHAT),
    (Messages(), MESSAGES),
    (Responses(), RESPONSES),
    (Gemini(), GEMINI),
]
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 1e308, 2**64, 10**400, -(2**63) - 1, "", "x", "\ud800", "\x00", "9" * 5000, "-"),
    *([], {}, [[]], [None], [5], ["a", 1], {"": {}}, {"a": 1}, {"type": "text"}, {"text": 5}, {"role": "user"}),
    *([{"type": "image"}], [{"type": []}], [{"type": {}}], {"type": ["text"]}, {"type": {"a": 1}}, "null", "{", "[1,2"),
    json.loads("[" * 99 + "]" * 99),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("dialect", "body"), BODIES, ids=lambda value: getattr(value, "name", ""))
def test_it_is_an_ask_or_a_refusal_in_words(dialect: Dialect, body: dict[str, Any], training: bool) -> None:
    history = HistoryIndex.from_turns([])

    def tried(spoiled: dict[str, Any]) -> str:
        try:
            ask = dialect.parse(json.dumps(spoiled).encode(), training=training, path={"model": "models/m"})
        except BadRequest as refusal:
            return str(refusal)
        key = history.key(history.shared(ask.messages), ask.tools)
        assert retry_key(key, dialect.name, ask, Marks.of([]))
        orjson.dumps([ask.messages, ask.tools, ask.render_body, ask.params])  # what goes to the engine and the store
        return ""

    assert tried(body) == ""
    outcomes = [tried(replaced(body, path, value)) for path in places(body)[1:] for value in VALUES]
    assert {words for words in outcomes if len(words) <= 15} == {""}
