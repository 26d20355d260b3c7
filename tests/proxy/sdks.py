"""One question to a rollout through the official SDK of each dialect, and its answer in one form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
from google import genai
from google.genai import types

from turngate.proxy import wire

Said = tuple[str, str]
"""The text of an answer, and why it ended in the dialect's own word."""

Asking = Callable[..., Said]


def ask_chat(created: wire.RolloutCreated, text: str, *, stream: bool, idle_s: float = 120, retries: int = 0) -> Said:
    """Chat completions by the openai SDK; `idle_s` is its timeout, which httpx takes for the longest silence."""
    client = _openai(created, idle_s, retries)
    request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": text}]}
    if not stream:
        choice = client.chat.completions.create(**request).choices[0]
        return choice.message.content or "", choice.finish_reason
    pieces = [event.choices[0] for event in client.chat.completions.create(**request, stream=True)]
    return "".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason or ""


def ask_responses(
    created: wire.RolloutCreated, text: str, *, stream: bool, idle_s: float = 120, retries: int = 0
) -> Said:
    """Responses by the openai SDK."""
    client = _openai(created, idle_s, retries)
    if not stream:
        answer = client.responses.create(model="m", input=text)
    else:
        answer = list(client.responses.create(model="m", input=text, stream=True))[-1].response
    return answer.output_text, answer.status or ""


def ask_messages(
    created: wire.RolloutCreated, text: str, *, stream: bool, idle_s: float = 120, retries: int = 0
) -> Said:
    """Messages by the anthropic SDK."""
    base = created.base_url.removesuffix("/v1")
    client = anthropic.Anthropic(base_url=base, api_key=created.api_key, max_retries=retries, timeout=idle_s)
    request: dict[str, Any] = {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": text}]}
    if stream:
        with client.messages.stream(**request) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**request)
    return "".join(block.text for block in message.content), message.stop_reason or ""


def ask_gemini(created: wire.RolloutCreated, text: str, *, stream: bool, idle_s: float = 120, retries: int = 0) -> Said:
    """Gemini by the google-genai SDK."""
    options = types.HttpOptions(
        base_url=created.base_url,
        timeout=round(idle_s * 1000),
        retry_options=types.HttpRetryOptions(attempts=retries + 1, initial_delay=0.1, max_delay=0.5),
    )
    client = genai.Client(api_key="unused", http_options=options)
    if stream:
        events = list(client.models.generate_content_stream(model="m", contents=text))
    else:
        events = [client.models.generate_content(model="m", contents=text)]
    parts = [part for event in events for part in event.candidates[0].content.parts or ()]
    return "".join(part.text or "" for part in parts), str(events[-1].candidates[0].finish_reason.value)


def _openai(created: wire.RolloutCreated, idle_s: float, retries: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=created.base_url, api_key=created.api_key, max_retries=retries, timeout=idle_s)


SDKS: dict[str, tuple[Asking, str, str]] = {
    "chat": (ask_chat, "stop", "length"),
    "responses": (ask_responses, "completed", "incomplete"),
    "messages": (ask_messages, "end_turn", "max_tokens"),
    "gemini": (ask_gemini, "STOP", "MAX_TOKENS"),
}
"""By dialect: how to ask, its word for an answer that is whole, and for one that was cut."""
