"""The official anthropic SDK on a session, and conversations as its users hold them."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.gateway_process import GatewayProcess
from turngate.proxy import wire

TOOLS: list[Any] = [
    {
        "name": "bash",
        "description": "run",
        "input_schema": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        },
    }
]


def session(gateway: GatewayProcess, **new: object) -> tuple[wire.RolloutCreated, anthropic.Anthropic]:
    """A new rollout and an SDK client on it."""
    created = gateway.client.create_rollout(wire.NewRollout.model_validate({"task": "test", **new}))
    base = created.base_url.removesuffix("/v1")
    return created, anthropic.Anthropic(base_url=base, api_key=created.api_key, max_retries=0, timeout=120)


def asking(text: str, **more: Any) -> dict[str, Any]:
    """The arguments of one request."""
    return {"model": "m", "max_tokens": 500, "messages": [{"role": "user", "content": text}], **more}


def say(client: anthropic.Anthropic, *, stream: bool, **request: Any) -> anthropic.types.Message:
    """One answer, whole or by the stream helper."""
    if not stream:
        return client.messages.create(**request)
    with client.messages.stream(**request) as events:
        return events.get_final_message()


def results_of(message: anthropic.types.Message, text: str = "done é") -> list[dict[str, Any]]:
    """A result for each call, the last one first, as they may be completed."""
    calls = [block for block in message.content if block.type == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": call.id, "content": text} for call in reversed(calls)]
