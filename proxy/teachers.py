"""Teachers: who answers in a session whose upstream is not the policy. A script, or an OpenAI-compatible endpoint.

The answer is what a student is to imitate, so it is taken as told or refused, never mended. A key is read from the
environment for each request; it must never reach the store, a log or an agent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from turngate.proxy import wire
from turngate.proxy.ask import Ask
from turngate.proxy.engine.derenderer import mint_tool_call_id
from turngate.proxy.errors import EngineTrouble

PASSED_ON = (
    "temperature",
    "top_p",
    "max_tokens",
    "max_completion_tokens",
    "tool_choice",
    "parallel_tool_calls",
    "stop",
)
"""What of an agent's own request a teacher gets besides messages and tools."""
ATTEMPTS = 3
PAUSE_S = 1.0
SIDE_ANSWER = "Task"
"""What a script says where it is not the main conversation that asks, such as for a title."""


@dataclass(frozen=True, slots=True)
class Told:
    """A teacher's answer: an assistant message of role, content and tool calls, whole or `cut` by a length limit."""

    message: Mapping[str, Any]
    cut: bool = False


class TeacherFault(EngineTrouble):
    """The teacher gave no answer that can be imitated; the message says which and why."""

    code = "teacher_error"


def scripted(teacher: wire.ScriptTeacher, ask: Ask, *, main: bool) -> Told | None:
    """The script's next turn, counted by the answers the request already holds; None once it is over."""
    if not main:
        return Told(message_of(SIDE_ANSWER, ()))
    turn = sum(message.get("role") == "assistant" for message in ask.messages)
    if turn >= len(teacher.turns):
        return None
    said = teacher.turns[turn]
    calls = [(call.name, orjson.dumps(call.arguments).decode()) for call in said.tool_calls]
    return Told(message_of(said.content, calls))


def message_of(content: str, calls: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """An assistant message of a text and `(name, arguments as JSON)` calls, with fresh call ids."""
    text = content.strip()
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if calls:
        message["tool_calls"] = [
            {"id": mint_tool_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    return message


class Teachers:
    """Connections to teachers; one a gateway process."""

    def __init__(self) -> None:
        self._http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()

    async def ask(self, teacher: wire.OpenAITeacher, ask: Ask) -> Told:
        """The endpoint's answer; busy and failing ones are asked again, `ATTEMPTS` times in all.

        Raises:
            TeacherFault: it refused, failed, or said what cannot be imitated.
        """
        body = {
            "model": teacher.model,
            "messages": list(ask.messages),
            **({"tools": list(ask.tools)} if ask.tools else {}),
            **{key: ask.params[key] for key in PASSED_ON if ask.params.get(key) is not None},
            **teacher.params,
            "stream": False,
        }
        headers = {} if teacher.api_key_env is None else {"Authorization": f"Bearer {_key(teacher.api_key_env)}"}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return told(await self._post(teacher, body, headers))
            except _Again as error:
                if attempt == ATTEMPTS:
                    raise TeacherFault(f"the teacher {teacher.model} failed {ATTEMPTS} times: {error}") from error
                await asyncio.sleep(PAUSE_S * attempt)
        raise AssertionError("unreachable")

    async def _post(self, teacher: wire.OpenAITeacher, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        if self._http is None:
            self._http = httpx.AsyncClient()
        url = f"{teacher.url.rstrip('/')}/chat/completions"
        try:
            answer = await self._http.post(
                url, content=orjson.dumps(body), headers={**_JSON, **headers}, timeout=teacher.timeout_s
            )
        except httpx.HTTPError as error:
            raise _Again(type(error).__name__) from error
        if answer.status_code == 429 or answer.status_code >= 500:
            raise _Again(f"HTTP {answer.status_code}: {answer.text[:200]}")
        if answer.status_code != 200:
            raise TeacherFault(f"the teacher {teacher.model} refused: HTTP {answer.status_code}: {answer.text[:300]}")
        try:
            return orjson.loads(answer.content)
        except orjson.JSONDecodeError as error:
            raise TeacherFault(f"the teacher {teacher.model} did not answer with JSON") from error


_JSON = {"Content-Type": "application/json"}


class _Again(Exception):
    """Worth another attempt."""


def _key(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key:
        raise TeacherFault(f"the gateway's environment has no {variable}, which the teacher's api_key_env names")
    return key


def told(answer: Any) -> Told:
    """The message in a chat completion. Reasoning is left out: another model's is not the student's to imitate.

    Raises:
        TeacherFault: it is no chat completion, is empty, or a call's arguments are not a JSON object.
    """
    try:
        choice = answer["choices"][0]
        content, found = choice["message"].get("content") or "", choice["message"].get("tool_calls") or ()
        calls = [(str(call["function"]["name"]), str(call["function"]["arguments"])) for call in found]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise TeacherFault(f"the teacher's answer is no chat completion: {str(answer)[:200]}") from error
    if not isinstance(content, str) or not (content.strip() or calls):
        raise TeacherFault("the teacher's answer has neither text nor tool calls")
    for name, arguments in calls:
        try:
            sound = isinstance(orjson.loads(arguments), dict)
        except orjson.JSONDecodeError:
            sound = False
        if not sound:
            raise TeacherFault(f"the teacher's call of {name} has arguments that are no JSON object: {arguments[:200]}")
    return Told(message_of(content, calls), cut=choice.get("finish_reason") == "length")
