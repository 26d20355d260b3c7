"""Who answers in place of the policy: the bodies of demonstrations on the administration wire.

`wire` hands them on: import them from there. They must never hold a key, only the name of the variable that does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from turngate.proxy.wire_base import MAX_WAIT_S, Sent


class SaidCall(Sent):
    """A tool call of a scripted turn."""

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)


class SaidTurn(Sent):
    """One scripted answer: text, tool calls, or both."""

    content: str = ""
    tool_calls: list[SaidCall] = Field([])


class ScriptTeacher(Sent):
    """A teacher that says `turns`, one after another, in the main conversation; after the last one the run ends."""

    kind: Literal["script"] = "script"
    turns: list[SaidTurn] = Field(min_length=1)


class OpenAITeacher(Sent):
    """A teacher behind an OpenAI-compatible endpoint. Its key is read by the gateway and never stored."""

    kind: Literal["openai"] = "openai"
    url: str = Field(pattern=r"^https?://[^@\s]+$", description="base URL, `/v1` included, no user or password in it")
    model: str = Field(min_length=1)
    api_key_env: str | None = Field(
        None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="variable of the gateway's environment with the key"
    )
    params: dict[str, Any] = Field(
        default_factory=dict, description="more of the request's body, such as temperature; wins over the agent's"
    )
    timeout_s: float = Field(600.0, gt=0, le=MAX_WAIT_S, description="longest wait for one answer")


Upstream = Annotated[ScriptTeacher | OpenAITeacher, Field(discriminator="kind")]
