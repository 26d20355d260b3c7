"""OpenAI Responses: the body that Codex and others send, and the bodies and stream events they get.

Pure translation, as in `chat.py`; items are in `responses_input.py`, tools in `responses_tools.py`, answers in
`responses_output.py`. Nothing is kept between requests: whatever would need that is refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turngate.proxy.ask import Answer, Ask
from turngate.proxy.dialects.chat import json_body
from turngate.proxy.dialects.responses_input import chat_messages
from turngate.proxy.dialects.responses_output import Events, Parts, finished, response
from turngate.proxy.dialects.responses_tools import Tools, chat_choice, read_tools
from turngate.proxy.errors import BadRequest, GatewayRefusal
from turngate.proxy.sampling import ASKED_KEYS, asked_by

STATEFUL = ("previous_response_id", "conversation", "prompt")
"""What names something that an earlier request left at the server."""

IGNORED = ("truncation", "top_logprobs", "max_tool_calls", "moderation", "context_management")
"""What changes an answer of OpenAI's and is noted, since it changes nothing here."""

OWN = frozenset({"max_tokens", "max_completion_tokens", "response_format", "logprobs", "n", "tool_choice"})
"""Chat words for what this wire says in others."""

RENDER_KEYS = ("structured_outputs", "chat_template_kwargs", "documents")
INCLUDE_TOKEN = "reasoning.encrypted_content"
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})


class Responses:
    """See `turngate.proxy.dialects.base.Dialect`."""

    name = "responses"

    def parse(self, raw: bytes, *, training: bool, path: Mapping[str, str]) -> Ask:
        """The ask in a request body."""
        return parse(raw, training=training)

    def completion(self, turn_id: str, model: str, created_s: int, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The whole answer of a request that did not stream."""
        parts = Parts(turn_id, ask.about["names"])
        for _ in parts.take(answer.message):
            pass
        parts.said_nothing()
        head = response(turn_id, model, created_s, ask, "completed")
        return finished(head, parts, answer, token=bool(ask.about["token"]))

    def events(self, turn_id: str, model: str, created_s: int, ask: Ask) -> Events:
        """The events of a streamed answer."""
        return Events(turn_id, model, created_s, ask)

    def refusal(self, refusal: GatewayRefusal) -> dict[str, Any]:
        """OpenAI's error object."""
        return refusal.body()


def parse(raw: bytes, *, training: bool) -> Ask:
    """The ask in a request body.

    Raises:
        BadRequest: not JSON, or a field is wrong; the message names it.
    """
    body = json_body(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object with input")
    _refuse_state(body)
    model = body.get("model")
    if not isinstance(model, str | None):
        raise BadRequest("model must be a string", param="model")
    tools = read_tools(body.get("tools"))
    messages = chat_messages(body.get("input"), body.get("instructions"))
    choice, choice_notes = chat_choice(body.get("tool_choice"), tools)
    rendered = _rendered(body, choice)
    include = _include(body.get("include"))
    notes = (
        *tools.notes,
        *choice_notes,
        *(("ignored:store",) if _flag(body, "store") else ()),
        *(f"ignored:{key}" for key in IGNORED if body.get(key) not in (None, "disabled", 0)),
        *(f"ignored:include.{one}" for one in include if one != INCLUDE_TOKEN),
    )
    return Ask(
        model=model or "",
        messages=messages,
        tools=list(tools.chat) or None,
        render_body=rendered,
        asked=_asked(body, rendered, training=training),
        stream=_flag(body, "stream"),
        include_usage=True,
        params={key: value for key, value in body.items() if key not in ("input", "instructions", "tools", "model")},
        notes=notes,
        about={"names": tools.names, "token": INCLUDE_TOKEN in include, "echo": _echo(body, tools)},
    )


def _refuse_state(body: Mapping[str, Any]) -> None:
    for key in STATEFUL:
        if body.get(key) is not None:
            raise BadRequest(
                f"{key} refers to what an earlier request left at the server, but nothing is kept between requests: "
                "send the whole conversation as input",
                param=key,
                code="stateless",
            )
    if _flag(body, "background"):
        raise BadRequest("background answers are not kept: ask with background=false", param="background")


def _rendered(body: Mapping[str, Any], choice: Any) -> dict[str, Any]:
    """What else changes the prompt or the grammar, in chat form."""
    rendered = {key: body[key] for key in RENDER_KEYS if body.get(key) is not None}
    if choice is not None:
        rendered["tool_choice"] = choice
    if body.get("parallel_tool_calls") is not None:
        rendered["parallel_tool_calls"] = _flag(body, "parallel_tool_calls")
    reasoning = _object(body, "reasoning")
    effort = reasoning.get("effort")
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise BadRequest(f"reasoning.effort must be one of {', '.join(sorted(EFFORTS))}", param="reasoning.effort")
        rendered["reasoning_effort"] = effort
    form = _object(body, "text").get("format")
    if form is not None and (form := _response_format(form)) is not None:
        rendered["response_format"] = form
    return rendered


def _response_format(form: Any) -> dict[str, Any] | None:
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema" or not isinstance(form.get("schema"), Mapping):
        raise BadRequest(
            'text.format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": …, '
            '"schema": …}',
            param="text.format",
        )
    kept = {key: form[key] for key in ("schema", "strict", "description") if form.get(key) is not None}
    return {"type": "json_schema", "json_schema": {"name": str(form.get("name") or "answer"), **kept}}


def _asked(body: Mapping[str, Any], rendered: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
    wishes = {key: body[key] for key in ASKED_KEYS if key not in OWN and body.get(key) is not None}
    wishes |= {key: rendered[key] for key in ("tool_choice", "response_format") if key in rendered}
    limit = body.get("max_output_tokens")
    if limit is not None:
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise BadRequest("max_output_tokens must be a whole number of at least 1", param="max_output_tokens")
        wishes["max_tokens"] = limit
    wishes.pop("top_logprobs", None)
    return asked_by(wishes, training=training)


def _include(value: Any) -> list[str]:
    if not isinstance(value, list | None) or not all(isinstance(one, str) for one in value or ()):
        raise BadRequest("include must be a list of names", param="include")
    return value or []


def _echo(body: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
    """What a response says back of its request."""
    reasoning = _object(body, "reasoning")
    choice, parallel = body.get("tool_choice"), body.get("parallel_tool_calls")
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": "auto" if choice is None else choice,
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
    }


def _object(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = body.get(key)
    if not isinstance(value, Mapping | None):
        raise BadRequest(f"{key} must be an object", param=key)
    return value or {}


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if not isinstance(value, bool | None):
        raise BadRequest(f"{key} must be true or false, not {value!r:.100}", param=key)
    return bool(value)
