"""Chat templates for tests and a renderer for them: jinja over a toy tokenizer whose special tokens are atomic.

The templates are our own, one for each habit found in the wild: plain, dropping earlier reasoning, moving the tools,
refusing tool results, treating the last message apart, having no end-of-turn token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jinja2

from turngate.proxy.engine.errors import EngineRefused

SPECIALS = ("<s>", "<user>", "<assistant>", "<tool>", "<system>", "<end>", "<think>", "</think>")

_TOOL_LIST = "{% if tools %}<system>{{ tools | tojson }}<end>\n{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}\ncall {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
_ANSWER = "<assistant>{{ m.content or '' }}" + _CALLS + "<end>\n"
_OTHERS = "<{{ m.role }}>{{ m.content or '' }}<end>\n"
_PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"

PLAIN = (
    "<s>" + _TOOL_LIST + "{% for m in messages %}{% if m.role == 'assistant' %}"
    + _ANSWER + "{% else %}" + _OTHERS + "{% endif %}{% endfor %}" + _PROMPT
)  # fmt: skip
"""Everything appends; neighbouring tool results stay apart; reasoning fields are never shown."""

GROUPS_RESULTS = (
    "<s>" + _TOOL_LIST + "{% for m in messages %}{% if m.role == 'assistant' %}" + _ANSWER
    + "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<user>{% endif %}[{{ m.content }}]"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<end>\n{% endif %}"
    "{% else %}" + _OTHERS + "{% endif %}{% endfor %}" + _PROMPT
)  # fmt: skip
"""Neighbouring tool results share one user turn."""

DROPS_REASONING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "<s>" + _TOOL_LIST + "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set text = m.content or '' %}{% set r = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}{% set r = text.split('</think>')[0].split('<think>')[-1] %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<assistant>{% if loop.index0 > ns.last and (loop.last or r) %}<think>{{ r.strip() }}</think>{% endif %}"
    "{{ text }}" + _CALLS + "<end>\n{% else %}" + _OTHERS + "{% endif %}{% endfor %}" + _PROMPT
)  # fmt: skip
"""Reasoning stays while tools are called and goes at the next user message; the last answer is treated apart."""

MOVES_TOOLS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "<s>{% for m in messages %}{% if loop.index0 == ns.last %}" + _TOOL_LIST + "{% endif %}"
    "{% if m.role == 'assistant' %}" + _ANSWER + "{% else %}" + _OTHERS + "{% endif %}{% endfor %}" + _PROMPT
)  # fmt: skip
"""The tool list stands before the last user message."""

NO_TOOLS = (
    "<s>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if m.role == 'assistant' %}" + _ANSWER + "{% else %}" + _OTHERS + "{% endif %}{% endfor %}" + _PROMPT
)  # fmt: skip
"""Tool results are refused."""

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
"""System messages are refused."""

ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% endfor %}" + PLAIN
)
"""Parallel calls are refused."""

NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}\n{% endfor %}"
"""Turns are told apart by text alone."""

TWO_ENDS = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}" + _ANSWER + "{% else %}" + _OTHERS + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% else %}<end>{% endif %}"
)  # fmt: skip
"""A conversation without generation prompt ends with one more end token: counting it would cut inside new text."""

COUNTS_TURNS = (
    "<s>{% for m in messages %}<{{ m.role }}>{{ loop.length }} {{ m.content or '' }}<end>\n{% endfor %}" + _PROMPT
)
"""Every turn says how long the conversation is."""


class ToyRenderer:
    """`Render` over a jinja template. Words, spaces and signs are tokens; the special ones are atomic everywhere."""

    def __init__(self, template: str, *, refuses_tools: bool = False) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.ChainableUndefined)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template)
        self._refuses_tools = refuses_tools
        self._ids: dict[str, int] = {}
        self.bodies: list[Mapping[str, Any]] = []
        self.end = self.encode("<end>")[0]

    async def __call__(self, body: Mapping[str, Any]) -> list[int]:
        """Ids of a chat-completions body."""
        self.bodies.append(body)
        if body.get("tools") and self._refuses_tools:
            raise EngineRefused(400, "tool choice requires a parser")
        return self.encode(self.text(body))

    def text(self, body: Mapping[str, Any]) -> str:
        """The rendered text, arguments parsed as engines do."""
        messages = [_parsed(message) for message in body["messages"]]
        kwargs = {"add_generation_prompt": True, "tools": None, **body, **body.get("chat_template_kwargs", {})}
        return self._template.render(**{**kwargs, "messages": messages})

    def encode(self, text: str) -> list[int]:
        """Ids of a text; new words get new ids."""
        pieces = re.findall("|".join(map(re.escape, SPECIALS)) + r"|\w+|\s+|[^\w\s]", text)
        return [self._ids.setdefault(piece, len(self._ids) + 1) for piece in pieces]


def _refuse(message: str) -> None:
    raise EngineRefused(400, message)


def _parsed(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls}
