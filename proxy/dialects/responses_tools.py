"""Tools of the Responses wire as chat tools, and the names under which a call goes back to the agent.

Chat knows one flat name a tool, Responses also namespaces and freeform tools, so a name is made from both by one pure
rule: a call in an echoed history gets the name it was sampled with, whatever tools that request offers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from turngate.proxy.errors import BadRequest

INPUT = "input"
"""The one argument of a freeform tool."""

RAW_MARK = "_raw"
"""Ends the call id of a freeform call whose sampled arguments were not `{"input": text}`: its input is those very
arguments, and comes back as such."""

Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Name:
    """What the agent calls a tool: its name, its namespace, and whether it is freeform (`custom`)."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """`chat` are the tools as the engine sees them, `names` what each is called by the agent, `notes` what was left
    out."""

    chat: tuple[Tool, ...]
    names: Mapping[str, Name]
    notes: tuple[str, ...]


def flat_name(name: str, namespace: str | None) -> str:
    """The chat name of a tool in a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def read_tools(tools: Any) -> Tools:
    """The tools of a request; types that only OpenAI's own servers have are left out with a note.

    Raises:
        BadRequest: a tool has no name, or two get the same one.
    """
    if not isinstance(tools, list | None):
        raise BadRequest("tools must be a list", param="tools")
    chat: list[Tool] = []
    names: dict[str, Name] = {}
    notes: list[str] = []
    for where, namespace, tool in _each(tools or ()):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            notes.append(f"ignored_tool:{kind}")
            continue
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"{where}.name must be the tool's name", param="tools")
        flat = flat_name(name, namespace)
        if flat in names:
            raise BadRequest(f"{where} is called {flat!r}, as another tool is: give it another name", param="tools")
        names[flat] = Name(name, namespace, kind == "custom")
        chat.append(
            {"type": "function", "function": _custom(flat, tool) if kind == "custom" else _function(flat, tool)}
        )
    return Tools(tuple(chat), names, tuple(dict.fromkeys(notes)))


def chat_choice(choice: Any, tools: Tools) -> tuple[Any, tuple[str, ...]]:
    """`tool_choice` in chat form, and notes.

    Raises:
        BadRequest: it names no tool that the gateway can offer.
    """
    if choice is None or choice in ("auto", "none", "required"):
        return choice, ()
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "allowed_tools" and choice.get("mode", "auto") in ("auto", "required"):
        return choice.get("mode", "auto"), ("ignored:allowed_tools",)
    name = choice.get("name") if kind in ("function", "custom") else None
    flat = flat_name(name, choice.get("namespace")) if isinstance(name, str) else None
    if flat not in tools.names:
        raise BadRequest(
            f"tool_choice {choice!r:.200} names none of the request's tools: use auto, none, required or "
            '{"type": "function", "name": …}',
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": flat}}, ()


def chat_arguments(custom_input: str, call_id: str) -> str:
    """The arguments of an echoed freeform call, as its model gave them in meaning."""
    return custom_input if call_id.endswith(RAW_MARK) else orjson.dumps({INPUT: custom_input}).decode()


def custom_input(arguments: str) -> tuple[str, str]:
    """The input of a freeform call, and what its call id ends with."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, dict) and list(found) == [INPUT] and isinstance(found[INPUT], str):
        return found[INPUT], ""
    return arguments, RAW_MARK


def _each(tools: list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """`(where, namespace, tool)` of every tool, those inside namespaces too."""
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
            raise BadRequest(f"tools[{i}] must be an object with type and name", param="tools")
        if tool.get("type") != "namespace":
            namespace = tool.get("namespace")
            if not isinstance(namespace, str | None):
                raise BadRequest(f"tools[{i}].namespace must be a string", param="tools")
            yield f"tools[{i}]", namespace, tool
            continue
        name, inner = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not name or not isinstance(inner, list):
            raise BadRequest(f"tools[{i}] is a namespace, so it must have a name and a list of tools", param="tools")
        for j, one in enumerate(inner):
            if not isinstance(one, Mapping):
                raise BadRequest(f"tools[{i}].tools[{j}] must be an object with type and name", param="tools")
            yield f"tools[{i}].tools[{j}]", name, one


def _function(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return {"name": name, **kept}


def _custom(name: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function with the text as its one argument; a grammar is said in the description."""
    description, form = str(tool.get("description") or ""), tool.get("format")
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        description += f"\n\nThe input follows this {form.get('syntax', '')} grammar:\n{form.get('definition', '')}"
    properties = {INPUT: {"type": "string", "description": "the text that the tool gets"}}
    return {
        "name": name,
        "description": description.strip(),
        "parameters": {"type": "object", "properties": properties, "required": [INPUT]},
    }
