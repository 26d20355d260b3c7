"""Gemini's request in chat form: contents to messages, declarations to tools, generationConfig to sampling wishes.

Consecutive model contents are one assistant message, and calls are named by `call_names` whatever ids the client gives
them. What chat form cannot say (media, several candidates) is refused in words, never dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turngate.proxy.ask import Ask
from turngate.proxy.call_names import CallNames
from turngate.proxy.dialects.chat import json_body
from turngate.proxy.dialects.gemini_values import chat_arguments, field, json_schema, result_text, snake, whole_number
from turngate.proxy.errors import BadRequest
from turngate.proxy.sampling import asked_by

WISHES = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "candidateCount": "n",
    "stopSequences": "stop",
}
_WHOLE = frozenset({"topK", "maxOutputTokens", "seed", "candidateCount"})
_SAYS_NOTHING = frozenset({"thoughtSignature", "thought", "partMetadata", "videoMetadata"})
_KEPT_APART = frozenset({"contents", "tools", "systemInstruction"})


def parse(raw: bytes, model: str, *, training: bool) -> Ask:
    """The ask in a generateContent body, or in the `generateContentRequest` of a countTokens body; not streamed.

    Raises:
        BadRequest: not JSON, or a field is wrong; the message names it in Gemini's words.
    """
    body = json_body(raw)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object with contents")
    inner = field(body, "generateContentRequest")
    body = inner if isinstance(inner, dict) else body
    names = CallNames()
    messages = [*_system(field(body, "systemInstruction")), *Contents(names).messages(body.get("contents"))]
    tools, notes = _tools(body.get("tools"))
    wishes, shown = _wishes(_object(field(body, "generationConfig"), "generationConfig"))
    choice = _choice(_object(field(body, "toolConfig"), "toolConfig"), training=training)
    if choice is not None and tools:
        wishes["tool_choice"] = choice
    about: dict[str, Any] = {key: wishes[key] for key in ("tool_choice", "response_format") if key in wishes}
    kept_apart = _KEPT_APART | {snake(key) for key in _KEPT_APART}
    return Ask(
        model=model,
        messages=messages,
        tools=tools or None,
        render_body=about,
        asked=asked_by(wishes, training=training),
        stream=False,
        include_usage=True,
        params={key: value for key, value in body.items() if key not in kept_apart},
        notes=tuple(notes),
        about={"thoughts": shown},
        calls_before=names.made,
    )


class Contents:
    """Contents to messages, one after another; knows which calls still wait for their responses."""

    def __init__(self, names: CallNames) -> None:
        self._names = names
        self._messages: list[dict[str, Any]] = []
        self._waiting: list[tuple[str | None, str, str]] = []  # the wire's id, the function, our id

    def messages(self, contents: Any) -> list[dict[str, Any]]:
        """All contents as messages.

        Raises:
            BadRequest: one is malformed.
        """
        if isinstance(contents, dict | str):
            contents = [contents]
        if not isinstance(contents, list) or not contents:
            raise BadRequest("contents must be a list of at least one content", param="contents")
        for i, content in enumerate(contents):
            where = f"contents[{i}]"
            if isinstance(content, str):
                content = {"role": "user", "parts": [{"text": content}]}
            if not isinstance(content, dict):
                raise BadRequest(f"{where} must be an object with role and parts", param="contents")
            role = content.get("role") or "user"
            if role not in ("user", "model", "function", "tool"):
                raise BadRequest(f"{where}.role is {role!r}; use user or model", param="contents")
            parts = _parts(content.get("parts"), where)
            (self._model if role == "model" else self._user)(parts, where)
        return self._messages

    def _model(self, parts: list[dict[str, Any]], where: str) -> None:
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant":
            self._waiting = []
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        for i, part in enumerate(parts):
            place = f"{where}.parts[{i}]"
            call = field(part, "functionCall")
            if call is not None:
                last.setdefault("tool_calls", []).append(self._call(call, place))
            elif isinstance(part.get("text"), str):
                key = "reasoning" if part.get("thought") is True else "content"
                last[key] = last.get(key, "") + part["text"]
            else:
                _refuse_unless_empty(part, place)

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(call.get("args"), dict | None):
            raise BadRequest(f"{where}.functionCall must be an object with name and an object args", param="contents")
        arguments = chat_arguments(call.get("args"))
        ours = self._names.name(name, arguments)
        self._waiting.append((_id(call, where), name, ours))
        return {"id": ours, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _user(self, parts: list[dict[str, Any]], where: str) -> None:
        texts: list[str] = []
        for i, part in enumerate(parts):
            response = field(part, "functionResponse")
            if response is not None:
                self._flush(texts)
                self._messages.append(self._result(response, f"{where}.parts[{i}]"))
            elif isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                _refuse_unless_empty(part, f"{where}.parts[{i}]")
        self._flush(texts)

    def _flush(self, texts: list[str]) -> None:
        if texts:
            parts = [{"type": "text", "text": text} for text in texts]
            self._messages.append({"role": "user", "content": texts[0] if len(texts) == 1 else parts})
            texts.clear()

    def _result(self, response: Any, where: str) -> dict[str, Any]:
        name = response.get("name") if isinstance(response, dict) else None
        if not isinstance(name, str):
            raise BadRequest(f"{where}.functionResponse must be an object with name and response", param="contents")
        if response.get("parts"):
            raise BadRequest(f"{where}.functionResponse.parts: media cannot be taken, only response", param="contents")
        call_id = self._answered(_id(response, where), name)
        return {"role": "tool", "tool_call_id": call_id, "content": result_text(response.get("response"))}

    def _answered(self, wire_id: str | None, name: str) -> str:
        """Our id of the call that a response answers: by the wire's id, else the first that waits under that name."""
        waiting = self._waiting
        by_id = [one for one in waiting if wire_id is not None and one[0] == wire_id]
        by_name = [one for one in waiting if one[1] == name and (wire_id is None or one[0] is None)]
        for one in [*by_id, *by_name, *(one for one in waiting if one[1] == name)]:
            waiting.remove(one)
            return one[2]
        return wire_id or f"unasked{name}"


def _parts(parts: Any, where: str) -> list[dict[str, Any]]:
    if parts is None:
        return []
    if isinstance(parts, dict | str):
        parts = [parts]
    if not isinstance(parts, list):
        raise BadRequest(f"{where}.parts must be a list", param="contents")
    made = [{"text": part} if isinstance(part, str) else part for part in parts]
    for i, part in enumerate(made):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str | None):
            raise BadRequest(f"{where}.parts[{i}] must be an object such as {{text}}", param="contents")
    return made


def _refuse_unless_empty(part: Mapping[str, Any], where: str) -> None:
    silent = _SAYS_NOTHING | {snake(key) for key in _SAYS_NOTHING}
    for key, value in part.items():
        if value is not None and key not in silent:
            raise BadRequest(
                f"{where}.{key} cannot be taken: use text, functionCall or functionResponse (media and code are not "
                "supported by this gateway's text models)",
                param="contents",
            )


def _id(source: Mapping[str, Any], where: str) -> str | None:
    found = source.get("id")
    if not isinstance(found, str | None):
        raise BadRequest(f"{where}: id must be a string", param="contents")
    return found or None


def _system(instruction: Any) -> list[dict[str, Any]]:
    if instruction is None:
        return []
    if isinstance(instruction, list | str):
        instruction = {"parts": instruction}
    if not isinstance(instruction, dict):
        raise BadRequest("systemInstruction must be a content with text parts", param="systemInstruction")
    parts = _parts(instruction.get("parts"), "systemInstruction")
    texts = []
    for i, part in enumerate(parts):
        if isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            _refuse_unless_empty(part, f"systemInstruction.parts[{i}]")
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict | None):
        raise BadRequest(f"{name} must be an object", param=name)
    return value or {}


def _tools(tools: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Function declarations as tools in chat form, and a note for each built-in tool that there is none of."""
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list | None):
        raise BadRequest("tools must be a list of objects with functionDeclarations", param="tools")
    made, notes = [], []
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict):
            raise BadRequest(f"tools[{i}] must be an object with functionDeclarations", param="tools")
        for key, value in tool.items():
            if key not in ("functionDeclarations", "function_declarations"):
                notes += [f"ignored_tool:{key:.40}"] if value is not None else []
                continue
            if not isinstance(value, list):
                raise BadRequest(f"tools[{i}].{key} must be a list", param="tools")
            made += [_declaration(one, f"tools[{i}].{key}[{j}]") for j, one in enumerate(value)]
    return made, list(dict.fromkeys(notes))


def _declaration(declared: Any, where: str) -> dict[str, Any]:
    if not isinstance(declared, dict) or not isinstance(declared.get("name"), str):
        raise BadRequest(f"{where} must be an object with name", param="tools")
    function = {"name": declared["name"]}
    if isinstance(declared.get("description"), str):
        function["description"] = declared["description"]
    verbatim = field(declared, "parametersJsonSchema")
    schema = verbatim if verbatim is not None else json_schema(declared.get("parameters"))
    if not isinstance(schema, dict | None):
        raise BadRequest(f"{where}.parameters must be a schema object", param="tools")
    function["parameters"] = schema if schema is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _choice(config: Mapping[str, Any], *, training: bool) -> Any:
    """`tool_choice` of chat form; None where the model may choose."""
    calling = _object(field(config, "functionCallingConfig"), "toolConfig.functionCallingConfig")
    mode = str(calling.get("mode") or "AUTO").upper()
    allowed = field(calling, "allowedFunctionNames")
    if not isinstance(allowed, list | None) or not all(isinstance(name, str) for name in allowed or ()):
        raise BadRequest("allowedFunctionNames must be a list of names", param="toolConfig")
    if mode in ("AUTO", "MODE_UNSPECIFIED", "VALIDATED") and not allowed:
        return None
    if mode == "NONE":
        return "none"
    if training:
        raise BadRequest(
            f"functionCallingConfig {mode} with allowedFunctionNames {allowed or []} forces tokens the policy did not "
            "choose, which cannot be trained: use AUTO or NONE, or open the rollout with training=false",
            param="toolConfig",
        )
    if mode != "ANY" or len(allowed or ()) > 1:
        raise BadRequest("functionCallingConfig can force any function (ANY), or one by its name", param="toolConfig")
    return {"type": "function", "function": {"name": allowed[0]}} if allowed else "required"


def _wishes(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The sampling wishes in chat form's words, and whether thoughts are to be shown."""
    wishes: dict[str, Any] = {}
    for name, ours in WISHES.items():
        value = field(config, name)
        if value is None:
            continue
        if name in _WHOLE and not isinstance(value, bool):
            value = whole_number(value)
        wishes[ours] = value
    if isinstance(wishes.get("n"), int) and wishes["n"] > 1:
        raise BadRequest(
            "candidateCount > 1 is not supported: open one rollout for each sample and ask for one candidate",
            param="generationConfig",
        )
    if not wishes.get("top_k", 1):
        del wishes["top_k"]
    if (form := _response_format(config)) is not None:
        wishes["response_format"] = form
    thinking = _object(field(config, "thinkingConfig"), "generationConfig.thinkingConfig")
    return wishes, field(thinking, "includeThoughts") is True


def _response_format(config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = field(config, "responseMimeType") or "text/plain"
    verbatim, schema = field(config, "responseJsonSchema"), field(config, "responseSchema")
    if kind == "text/plain":
        return None
    if kind != "application/json":
        raise BadRequest(
            f"responseMimeType {kind!r} is not supported: use text/plain or application/json", param="generationConfig"
        )
    schema = verbatim if verbatim is not None else json_schema(schema)
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
