"""What an agent asks for, dialect-neutral: the value between a dialect's parser and the exchange that answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """One model call as wanted by the agent.

    `render_body` holds what else changes the prompt or the grammar (response_format, chat_template_kwargs, …);
    `asked` the sampling wishes; `params` everything of the body that is kept for the record; `notes` what the dialect
    left out or changed (kept as flags of the turn); `about` what the dialect needs to write its answer.
    `calls_before`: set by wires whose calls come back without ids: the answer's calls are then named by `call_names`,
    after these. `stream_type` is the content type of a streamed answer.
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[Message] | None
    render_body: Mapping[str, Any]
    asked: Mapping[str, Any]
    stream: bool
    include_usage: bool
    params: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    calls_before: Mapping[str, int] | None = None
    stream_type: bytes = b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int

    def openai(self) -> dict[str, int]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer: the whole assistant message, why it ended (OpenAI's words) and its usage.

    `stop` is the stop string that ended it, where one did.
    """

    message: Mapping[str, Any]
    finish_reason: str
    usage: Usage
    stop: str | None = None
