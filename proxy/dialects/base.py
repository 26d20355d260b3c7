"""What a dialect is: how a body of its wire becomes an ask, and how an answer becomes its bodies and stream events.

A dialect only translates. Inside the gateway everything is in the form of chat completions (messages, tools, deltas,
finish reasons), so that history, splice and training know one form; a dialect must never decide what is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from turngate.proxy.ask import Answer, Ask
from turngate.proxy.errors import GatewayRefusal


class Events(Protocol):
    """The stream events of one answer, as bytes; called in order, and the bytes are sent in that order."""

    def keepalive(self) -> bytes:
        """What the dialect's clients take as a sign of life, also before the first delta."""

    def start(self, prompt_tokens: int | None) -> None:
        """Called once, before the first delta: the prompt stands and counts `prompt_tokens` (None: not known yet).

        Nothing is sent: until the engine gives its first token, a fault can still be told by an HTTP status.
        """

    def delta(self, delta: Mapping[str, Any]) -> bytes:
        """A piece of the assistant message in chat form; may be empty bytes where the wire has nothing to say yet."""

    def end(self, answer: Answer) -> bytes:
        """All that ends a complete answer. Called once, after the turn was committed."""

    def error(self, refusal: GatewayRefusal) -> bytes:
        """A fault after the first byte; nothing follows."""


class Dialect(Protocol):
    """One wire. Without state: one value serves all requests."""

    @property
    def name(self) -> str:
        """The word in settings and records."""

    def parse(self, raw: bytes, *, training: bool, path: Mapping[str, str]) -> Ask:
        """The ask in a request body; `path` holds the path's parameters (Gemini names model and method there).

        Raises:
            BadRequest: not JSON, or a field is wrong; the message names it in this dialect's words.
        """

    def completion(self, turn_id: str, model: str, created_s: int, ask: Ask, answer: Answer) -> dict[str, Any]:
        """The body of a whole answer."""

    def events(self, turn_id: str, model: str, created_s: int, ask: Ask) -> Events:
        """The events of a streamed answer."""

    def refusal(self, refusal: GatewayRefusal) -> dict[str, Any]:
        """The body of a refusal; its HTTP status is the refusal's."""
