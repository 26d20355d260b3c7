"""Agents as load: conversations of a given size that grow over their turns, asked through an OpenAI base URL.

What comes back is counted and timed, and echoed in the next request as agents do. Answers are parsed after the clock
has stopped, so that this process takes as little as it can from the one that is measured.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

import httpx
from tokenizers import Tokenizer

ANSWER_TOKENS = 200
TOKENS_PER_S = 100.0

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} something in the repository and give back what was printed.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "path": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
    for name in ("bash", "read", "write", "grep")
]


@dataclass(frozen=True)
class Shape:
    """How many conversations, how many turns each, and the prompt's size at the first and at the last turn."""

    sessions: int
    turns: int
    first_tokens: int
    last_tokens: int

    @property
    def message_tokens(self) -> int:
        """Tokens of the message between two turns, so that the last prompt has its size."""
        return max((self.last_tokens - self.first_tokens) // max(self.turns - 1, 1) - ANSWER_TOKENS, 1)


SHAPES = {
    "short": Shape(16, 20, 2_000, 18_000),
    "long": Shape(32, 40, 16_000, 52_000),
    "huge": Shape(64, 3, 50_000, 100_000),
}
SETS = 8
"""So many different conversations; other sessions say the same again, behind a system message of their own."""


@dataclass
class Seen:
    """What the agents saw: one entry a turn, the answer's id with its wall time, and when it ended; and sums.

    `on_turn` is told how many turns there are, after each. Ends are of the machine's monotonic clock, in s.
    """

    wall_s: dict[str, float] = field(default_factory=dict)
    ended_s: list[float] = field(default_factory=list)
    on_turn: Callable[[int], None] = lambda _: None
    streamed: int = 0
    tool_turns: int = 0
    answer_tokens: int = 0
    prompt_tokens: int = 0

    @classmethod
    def together(cls, parts: Sequence[Seen]) -> Seen:
        """What agents of several processes saw."""
        whole = cls()
        for part in parts:
            whole.wall_s |= part.wall_s
            whole.ended_s += part.ended_s
            for name in ("streamed", "tool_turns", "answer_tokens", "prompt_tokens"):
                setattr(whole, name, getattr(whole, name) + getattr(part, name))
        return whole


class Texts:
    """Message bodies of an exact number of tokens, cut from the standard library's source."""

    def __init__(self, tokenizer: Tokenizer, modules: Sequence[ModuleType]) -> None:
        self._tokenizer = tokenizer
        source = "\n".join(inspect.getsource(module) for module in modules)
        self._ids: list[int] = tokenizer.encode(source, add_special_tokens=False).ids

    def text(self, tokens: int, seed: str) -> str:
        """Text of about `tokens` tokens, the same for the same seed."""
        start = random.Random(seed).randrange(len(self._ids))
        ids = (self._ids[start:] + self._ids * (tokens // len(self._ids) + 1))[:tokens]
        return str(self._tokenizer.decode(ids))


def fillers(texts: Texts) -> list[dict[str, Any]]:
    """Answers of `ANSWER_TOKENS` tokens for the fake engine: half of them with a tool call."""
    said = [{"content": texts.text(ANSWER_TOKENS - 1, f"answer {i}")} for i in range(8)]
    calls = []
    for i in range(8):
        arguments = json.dumps({"command": texts.text(110, f"command {i}"), "path": "src/main.py"})
        call = {"name": "bash", "arguments": arguments}
        calls.append({"content": texts.text(40, f"thought {i}"), "tool_calls": [call]})
    return [one for pair in zip(said, calls, strict=True) for one in pair]


def bodies(shape: Shape, texts: Texts, number: int) -> list[str]:
    """The messages an agent says in its turns."""
    first = texts.text(shape.first_tokens - 600, f"{number % SETS} first")
    more = (texts.text(shape.message_tokens, f"{number % SETS} {turn}") for turn in range(shape.turns - 1))
    return [first, *more]


def warming(shape: Shape, texts: Texts) -> list[list[dict[str, Any]]]:
    """Conversations in which each text stands in each of its forms, for an engine to read them once beforehand."""
    call = {"id": "call0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    found = []
    for number in range(SETS):
        for text in bodies(shape, texts, number):
            said = {"role": "user", "content": text}
            asked = {"role": "assistant", "content": "", "tool_calls": [call]}
            found.append([said, asked, {"role": "tool", "tool_call_id": "call0", "content": text}])
    return found


async def conversation(
    client: httpx.AsyncClient,
    base_url: str,
    key: str,
    said: Sequence[str],
    name: str,
    seen: Seen,
    asked: Mapping[str, Any],
) -> None:
    """One agent's session: a turn for each of its messages, asked when the one before was answered."""
    stream = bool(asked.get("stream"))
    system = {"role": "system", "content": f"You are agent {name}, and repair programs. Use the tools."}
    messages: list[dict[str, Any]] = [system, {"role": "user", "content": said[0]}]
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    for turn in range(len(said)):
        content = json.dumps({"messages": messages, "tools": TOOLS, **asked}).encode()
        begun_s = time.perf_counter()
        response = await client.post(f"{base_url}/chat/completions", content=content, headers=headers)
        ended_s = time.perf_counter()
        if response.status_code != 200:
            raise RuntimeError(f"turn {turn} of {name}: HTTP {response.status_code}: {response.text[:500]}")
        answer = streamed_answer(response.content) if stream else whole_answer(response.json())
        seen.wall_s[answer["id"]] = ended_s - begun_s
        seen.ended_s.append(ended_s)
        seen.streamed += stream
        seen.answer_tokens += answer["usage"]["completion_tokens"]
        seen.prompt_tokens += answer["usage"]["prompt_tokens"]
        calls = answer["message"].get("tool_calls") or []
        seen.tool_turns += bool(calls)
        seen.on_turn(len(seen.wall_s))
        if turn + 1 < len(said):
            replies = [{"role": "tool", "tool_call_id": call["id"], "content": said[turn + 1]} for call in calls]
            messages = [*messages, answer["message"], *(replies or [{"role": "user", "content": said[turn + 1]}])]


def whole_answer(body: dict[str, Any]) -> dict[str, Any]:
    """Turn id, message and usage of an answer that did not stream."""
    message = {key: value for key, value in body["choices"][0]["message"].items() if value is not None}
    return {"id": body["id"], "message": message, "usage": body["usage"]}


def streamed_answer(raw: bytes) -> dict[str, Any]:
    """The same of a streamed answer, put together as agents' SDKs do.

    Raises:
        RuntimeError: the stream did not end with `[DONE]`.
    """
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines.pop() != b"[DONE]":
        raise RuntimeError(f"a stream ended early: {raw[-300:]!r}")
    content, usage, turn_id = "", {}, ""
    calls: dict[int, dict[str, Any]] = {}
    for event in map(json.loads, lines):
        turn_id, usage = event["id"], event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                empty = {"id": piece.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(piece["index"], empty)
                for part in ("name", "arguments"):
                    call["function"][part] += piece["function"].get(part) or ""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"id": turn_id, "message": message, "usage": usage}


ASKED = {"model": "policy", "max_tokens": 1024}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


async def all_at_once(
    agents: Sequence[tuple[str, str]],
    shape: Shape,
    texts: Texts,
    seen: Seen,
    label: str,
    asked: Mapping[str, Any] = MappingProxyType(ASKED),
) -> None:
    """Every agent, (base URL, key), at once; they begin spread over the time of one answer. Every other one streams.

    `asked` is what each request says beside messages and tools.
    """
    said = [bodies(shape, texts, i) for i in range(min(SETS, len(agents)))]
    await some_at_once(agents, said, seen, label, asked)


async def some_at_once(
    agents: Sequence[tuple[str, str]],
    said: Sequence[Sequence[str]],
    seen: Seen,
    label: str,
    asked: Mapping[str, Any] = MappingProxyType(ASKED),
    *,
    first: int = 0,
    total: int | None = None,
    spread_s: float = ANSWER_TOKENS / TOKENS_PER_S,
) -> None:
    """The agents from number `first` on of `total`, with the messages of each set; all begin within `spread_s`."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    of = total or len(agents)
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=limits) as client:

        async def one(i: int, base_url: str, key: str) -> None:
            await asyncio.sleep(i / of * spread_s)
            own = {**asked, **(STREAMED if i % 2 == 0 else {})}
            await conversation(client, base_url, key, said[i % SETS], f"{label} {i}", seen, own)

        await asyncio.gather(*(one(first + i, *agent) for i, agent in enumerate(agents)))
