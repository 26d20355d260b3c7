"""Anthropic Messages: the body an agent sends (Claude Code, the anthropic SDK), and the bodies and events it gets.

The base URL of this dialect is `/s/<secret>`, because its clients add `/v1/messages` themselves. Only a translation:
blocks to chat form and back; it must never decide what is sampled, nor let an unknown field fail a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turngate.proxy.ask import Answer, Ask
from turngate.proxy.dialects.chat import json_body
from turngate.proxy.dialects.messages_input import Notes, chat_messages, chat_tools
from turngate.proxy.dialects.messages_output import (
    Events,
    content_blocks,
    ending,
    error_body,
    message_body,
    usage_of,
)
from turngate.proxy.errors import BadRequest, GatewayRefusal
from turngate.proxy.sampling import asked_by

KNOWN = frozenset(
    {
        *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
        *("temperature", "top_p", "top_k", "thinking", "output_config", "metadata", "cache_control"),
    }
)
"""Fields that mean something here, or that never mean anything to a model; of any other a note is kept."""

THINKING = {"enabled": True, "adaptive": True, "disabled": False}
_NUMBERS = ("max_tokens", "temperature", "top_p", "top_k")


class Messages:
    """See `turngate.proxy.dialects.base.Dialect`."""

    name = "messages"

    def parse(self, raw: bytes, *, training: bool, path: Mapping[str, str]) -> Ask:
        """The ask in a request body."""
        return parse(raw, training=training)

    def completion(self, turn_id: str, model: str, created_s: int, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The whole answer of a request that did not stream."""
        body = message_body(turn_id, model, content_blocks(turn_id, answer.message), usage_of(answer.usage))
        return {**body, **ending(ask, answer)}

    def events(self, turn_id: str, model: str, created_s: int, ask: Ask) -> Events:
        """The events of a streamed answer."""
        return Events(turn_id, model, ask)

    def refusal(self, refusal: GatewayRefusal) -> dict[str, Any]:
        """Anthropic's error object."""
        return error_body(refusal)


def parse(raw: bytes, *, training: bool) -> Ask:
    """The ask in a request body.

    Raises:
        BadRequest: not JSON, or a field is wrong; the message names it.
    """
    body = json_body(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object with messages")
    notes = Notes()
    messages = chat_messages(body.get("messages"), body.get("system"), notes)
    tools = chat_tools(body.get("tools"), notes)
    model, stream = body.get("model"), body.get("stream")
    if not isinstance(model, str | None):
        raise BadRequest("model must be a string", param="model")
    if not isinstance(stream, bool | None):
        raise BadRequest(f"stream must be true or false, not {stream!r:.60}", param="stream")
    stops = _stop_sequences(body.get("stop_sequences"))
    render_body = _tool_choice(body.get("tool_choice"), tools, training=training)
    render_body |= _thinking(body.get("thinking")) | _output(body.get("output_config"), notes)
    wishes = {key: body[key] for key in _NUMBERS if body.get(key) is not None} | render_body
    if stops:
        wishes["stop"] = list(stops)
    for key, value in body.items():
        if key not in KNOWN and value is not None:
            notes.add("ignored", key)
    return Ask(
        model=model or "",
        messages=messages,
        tools=tools,
        render_body=render_body,
        asked=asked_by(wishes, training=training),
        stream=bool(stream),
        include_usage=True,
        params={key: value for key, value in body.items() if key not in ("messages", "system", "tools", "model")},
        notes=notes.all(),
        about={"stop_sequences": stops},
    )


def _stop_sequences(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise BadRequest("stop_sequences must be a list of non-empty strings", param="stop_sequences")
    return tuple(value)


def _tool_choice(choice: Any, tools: Any, *, training: bool) -> dict[str, Any]:
    """Chat's `tool_choice` and `parallel_tool_calls`; auto is what chat does unasked."""
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise BadRequest('tool_choice must be an object of type "auto", "any", "tool" or "none"', param="tool_choice")
    if kind in ("any", "tool") and training:
        raise BadRequest(
            f'tool_choice of type "{kind}" forces tokens the policy did not choose, which cannot be trained: use '
            '"auto" or "none", or open the rollout with training=false',
            param="tool_choice",
        )
    if not tools:
        return {}
    found: dict[str, Any] = {}
    if kind == "any":
        found["tool_choice"] = "required"
    elif kind == "none":
        found["tool_choice"] = "none"
    elif kind == "tool":
        name = choice.get("name")
        if name not in [tool["function"]["name"] for tool in tools]:
            raise BadRequest(f"tool_choice.name {name!r:.60} is none of the tools", param="tool_choice")
        found["tool_choice"] = {"type": "function", "function": {"name": name}}
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _thinking(thinking: Any) -> dict[str, Any]:
    """The switch that templates know by one of two names; engines pass a template only what it knows."""
    if thinking is None:
        return {}
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if not isinstance(kind, str) or kind not in THINKING:
        raise BadRequest('thinking must be an object of type "enabled", "adaptive" or "disabled"', param="thinking")
    return {"chat_template_kwargs": {"enable_thinking": THINKING[kind], "thinking": THINKING[kind]}}


def _output(config: Any, notes: Notes) -> dict[str, Any]:
    """A wanted JSON schema as chat's `response_format`."""
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise BadRequest("output_config must be an object", param="output_config")
    wanted = config.get("format")
    for key in config:
        if key != "format":
            notes.add("ignored", "output_config", str(key))
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return {}
    if not isinstance(wanted.get("schema"), dict):
        raise BadRequest("output_config.format.schema must be an object", param="output_config")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"]}}
    return {"response_format": form}
