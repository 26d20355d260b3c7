"""A client of chat completions that keeps what an SDK would hide: every event, strictly parsed.

Nothing here knows which target it talks to.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 300.0
NULL = object()
"""Sent as `null`; `None` leaves a key out."""


@dataclass(frozen=True)
class Session:
    """Where and how an agent asks: `url` ends with `/v1`; `extra` goes into each body that does not say otherwise."""

    url: str
    key: str
    model: str
    id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    kept: list[Answer] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """As SDKs send the key."""
        return {"authorization": f"Bearer {self.key}", "x-api-key": self.key, "anthropic-version": "2023-06-01"}


@dataclass
class Call:
    """A tool call, put together. `ids` are the ids that its deltas had."""

    name: str = ""
    arguments: str = ""
    ids: list[str] = field(default_factory=list)


@dataclass
class Choice:
    """One choice, put together."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Answer:
    """What came back. `events` are the parsed chunks of a stream, or the one body."""

    status: int
    text: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def choice(self) -> Choice:
        """The only choice."""
        assert self.status == 200, f"HTTP {self.status}: {self.text[:300]}"
        return self.choices[0]

    @property
    def message(self) -> dict[str, Any]:
        """As an agent echoes it."""
        choice = self.choice
        said: dict[str, Any] = {"role": "assistant", "content": choice.content or None}
        if choice.calls:
            said["tool_calls"] = [
                {
                    "id": (call.ids or ["none"])[0],
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls.values()
            ]
        return said

    def take(self, event: dict[str, Any]) -> None:
        """Add a chunk or a whole body."""
        self.events.append(event)
        self.usage = event.get("usage") or self.usage
        self.prompt_ids = event.get("prompt_token_ids") or self.prompt_ids
        for one in event.get("choices", ()):
            self._add(self.choices.setdefault(one["index"], Choice()), one)

    def _add(self, choice: Choice, one: dict[str, Any]) -> None:
        said = one.get("delta") or one.get("message") or {}
        choice.content += said.get("content") or ""
        choice.reasoning += said.get("reasoning") or said.get("reasoning_content") or ""
        choice.finish_reason = one.get("finish_reason") or choice.finish_reason
        choice.token_ids += one.get("token_ids") or ()
        choice.logprobs += [entry["logprob"] for entry in (one.get("logprobs") or {}).get("content") or ()]
        for place, call in enumerate(said.get("tool_calls") or ()):
            kept = choice.calls.setdefault(call.get("index", place), Call())
            if call.get("id"):
                kept.ids.append(call["id"])
            kept.name += (call.get("function") or {}).get("name") or ""
            kept.arguments += (call.get("function") or {}).get("arguments") or ""


def strict(text: str) -> dict[str, Any]:
    """Parse JSON as the standard has it: `NaN` and `Infinity` are errors."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is no JSON: {text[:300]}")

    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


def chat(session: Session, messages: list[Any], *, stream: bool = False, **body: Any) -> Answer:
    """One whole call of chat completions."""
    with begun(session, messages, stream=stream, **body) as (answer, events):
        for _ in events:
            continue
    session.kept.append(answer)
    return answer


@contextmanager
def begun(
    session: Session, messages: list[Any], *, stream: bool = True, timeout_s: float = TIMEOUT_S, **body: Any
) -> Iterator[tuple[Answer, Iterator[dict[str, Any]]]]:
    """A call whose events are taken one by one; leaving the block hangs up."""
    whole = {"model": session.model, "messages": messages, "max_tokens": 400, **session.extra, "stream": stream}
    whole = {key: value for key, value in {**whole, **body}.items() if value is not None}
    whole = {key: None if value is NULL else value for key, value in whole.items()}
    url = f"{session.url}/chat/completions"
    with (
        httpx.Client(trust_env=False) as client,
        client.stream("POST", url, json=whole, headers=session.headers, timeout=timeout_s) as response,
    ):
        answer = Answer(response.status_code)
        yield answer, _taken(answer, response, stream=stream)


def _taken(answer: Answer, response: httpx.Response, *, stream: bool) -> Iterator[dict[str, Any]]:
    if response.status_code != 200 or not stream:
        answer.text = response.read().decode()
        if response.status_code == 200:
            answer.take(strict(answer.text))
            yield answer.events[-1]
        return
    for line in response.iter_lines():
        answer.text += line + "\n"
        if line.startswith("data: ") and line != "data: [DONE]":
            event = strict(line.removeprefix("data: "))
            assert "error" not in event, f"an error in the stream: {event['error']}"
            answer.take(event)
            yield event


@contextmanager
def asked(session: Session, body: dict[str, Any]) -> Iterator[None]:
    """A request under way, whose client hangs up at the end of the block."""
    url = httpx.URL(session.url)
    data = json.dumps({"model": session.model, **body}).encode()
    headers = {**session.headers, "host": url.netloc.decode(), "content-type": "application/json"}
    lines = [f"POST {url.path}/chat/completions HTTP/1.1", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        yield
