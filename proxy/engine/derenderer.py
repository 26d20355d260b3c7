"""Turning one answer's tokens into deltas: when derender is called, what is held back, which finish reason it gets.

vLLM's derender replays all earlier output on each call, leaks stop tokens into the text and does not cut stop strings,
so those three are handled here, on values; HTTP is behind the `derender` callable. Token ids are never changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from turngate.proxy.engine.endings import Endings
from turngate.proxy.engine.replica import Derender
from turngate.proxy.engine.text_ahead import TextAhead
from turngate.proxy.engine.types import Chunk
from turngate.proxy.engine.wire import Delta, State

# Ten events a second read as real streaming; more would only cost the engine's CPU.
MIN_GAP_S = 0.1
# Derender may take this part of the time at most, unless the output grew by `GROWTH` since the call before.
COST_SHARE = 0.2
GROWTH = 1.3
# Nobody acts on half the arguments of a tool call, so they may wait longer: until the output has doubled, or so long.
CALL_GROWTH = 2.0
CALL_GAP_S = 2.0

_TEXTS = ("reasoning", "reasoning_content", "content")


def mint_tool_call_id() -> str:
    """A fresh tool-call id: alphanumeric, since harnesses strip everything else."""
    return f"call{secrets.token_hex(10)}"


@dataclass(slots=True)
class _Segment:
    """Text not yet released, of one part of the message: a text part, or the arguments of the tool call `index`."""

    part: str
    index: int
    text: str
    head: dict[str, Any] | None = None


class AnswerStream:
    """One answer. Feed it every chunk of the generation; it gives OpenAI-style deltas.

    After the chunk with a finish reason, `message()` and `finish_reason` are final, and the deltas given so far add
    up to exactly that message. If `derender` raises, nothing is lost: replace `self.derender` (another replica's) and
    call `advance`. `agreed` turns False if derender did not say what was given ahead of it.

    Args:
        derender: `Replica.derenderer(...)`.
        stop: the request's stop strings; no part of one is ever released.
        clock: monotonic seconds.
        mint: makes tool-call ids.
        named_choice: the request forced one function by name; such answers finish with `stop`, not `tool_calls`.
        ends: ids that end a turn, for engines that report no stop reason (vLLM 0.26): another last id means that a
            stop string ended the answer.
        whole: nobody reads the deltas before the end, so derender is called only then.
        ahead: gives plain text without derender; None: every delta is derender's.
        endings: how plain answers ended before; None: derender is asked about the end of each.
    """

    def __init__(
        self,
        derender: Derender,
        *,
        stop: Sequence[str] = (),
        clock: Callable[[], float],
        mint: Callable[[], str] = mint_tool_call_id,
        named_choice: bool = False,
        ends: frozenset[int] = frozenset(),
        whole: bool = False,
        ahead: TextAhead | None = None,
        endings: Endings | None = None,
    ) -> None:
        self.derender = derender
        self._stop = tuple(one for one in stop if one)
        self._clock = clock
        self._mint = mint
        self._named_choice = named_choice
        self._ends = ends
        self._whole = whole
        self._ahead = ahead
        self._endings = endings
        self.agreed = True
        self._pending: list[int] = []
        self._sent_tokens = 0
        self._call_begun_tokens = 0
        self._state: State | None = None
        self._last_call_s: float | None = None
        self._last_cost_s = 0.0
        self._engine_finish: str | None = None
        self._stop_string: str | None = None
        self._unnamed_stop = False
        self._done = False
        self._held: list[_Segment] = []
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}

    async def feed(self, chunk: Chunk) -> list[Delta]:
        """The deltas that this chunk brings, often none. Raises what `derender` raises."""
        ids = list(chunk.ids)
        self._pending.extend(ids)
        if chunk.finish_reason is not None:
            self._engine_finish = chunk.finish_reason
            if isinstance(chunk.stop_reason, str):
                self._stop_string = chunk.stop_reason
            elif chunk.finish_reason == "stop" and self._pending:
                if chunk.stop_reason is None and self._stop and self._ends and self._pending[-1] not in self._ends:
                    self._unnamed_stop = True
                else:
                    self._pending.pop()
                    ids = ids[:-1]
        if self._ahead is not None and ids:
            self._ahead.take(ids)
            if self._ahead.in_step and not self._whole and self._engine_finish is None:
                self._hold(self._ahead.delta())
            if not self._call_begun_tokens and self._ahead.calling:
                self._call_begun_tokens = self._sent_tokens + len(self._pending)
        return await self.advance()

    async def advance(self) -> list[Delta]:
        """Call derender if it is time, or if the answer is over; see `feed`."""
        if self._done:
            return []
        if not self._engine_finish and not self._due():
            return self._release() if self._held else []
        plain = self._ahead is not None and self._ahead.plain
        if self._pending and not (self._engine_finish and plain):
            await self._derender(None)
        if self._engine_finish is None:
            return self._release()
        await self._end(self._engine_finish)
        self._done = True
        if self._unnamed_stop:
            held = [segment.text for segment in self._held]
            self._stop_string = next((stop for stop in self._stop if any(stop in text for text in held)), None)
        if self._stop_string:
            self._cut(self._stop_string)
        return self._release()

    @property
    def done(self) -> bool:
        """Whether the last chunk was fed and everything was released."""
        return self._done

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, when one did."""
        return self._stop_string

    @property
    def finish_reason(self) -> str | None:
        """The answer's finish reason: `stop`, `length` or `tool_calls`; None while it is not over."""
        if not self._done:
            return None
        if self._engine_finish == "stop" and self._calls and not self._named_choice:
            return "tool_calls"
        return self._engine_finish

    def message(self) -> dict[str, Any]:
        """The assistant message so far: `role`, `content`, and where there are any reasoning and `tool_calls`.

        `content` is None only when there are tool calls and no text. Arguments are as sampled.
        """
        content = "".join(self._texts.get("content", ()))
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        for part in _TEXTS[:2]:
            if part in self._texts:
                message[part] = "".join(self._texts[part])
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for _, call in sorted(self._calls.items())
            ]
        return message

    def _due(self) -> bool:
        """Whether to ask derender now; the answer is not over."""
        if not self._pending or self._whole or (self._ahead is not None and self._ahead.in_step):
            return False
        if self._last_call_s is None:
            return True
        elapsed = self._clock() - self._last_call_s
        if elapsed < MIN_GAP_S:
            return False
        affordable = elapsed * COST_SHARE >= self._last_cost_s
        tokens = len(self._pending) + self._sent_tokens
        if self._calls or self._call_begun_tokens:
            grown = tokens >= CALL_GROWTH * max(self._sent_tokens, self._call_begun_tokens)
            return grown or (affordable and elapsed >= CALL_GAP_S)
        return affordable or tokens >= GROWTH * self._sent_tokens

    async def _end(self, finish: str) -> None:
        """Hold what the end of the answer brings; derender is asked now and then where it is known without it."""
        ahead, endings = self._ahead, self._endings
        if ahead is None or endings is None or self._stop:
            await self._derender(finish)
        elif ahead.known:
            if endings.plain.believed():
                self._hold(ahead.delta())
                return
            await self._derender(finish)
            endings.plain.told(ahead.in_step)
        elif finish == "stop" and not self._pending and self._calls_are_whole() and ahead.closed(len(self._calls)):
            if endings.closed.believed():
                return
            held = [(segment.part, segment.text) for segment in self._held]
            await self._derender(finish)
            endings.closed.told(held == [(segment.part, segment.text) for segment in self._held])
        else:
            await self._derender(finish)

    def _calls_are_whole(self) -> bool:
        """Whether there are tool calls, and all their arguments are JSON objects to the end."""
        arguments = {index: "".join(call["arguments"]) for index, call in self._calls.items()}
        for segment in self._held:
            if segment.part == "tool_calls":
                arguments[segment.index] += segment.text
        try:
            return bool(arguments) and all(isinstance(orjson.loads(one), dict) for one in arguments.values())
        except orjson.JSONDecodeError:
            return False

    async def _derender(self, finish: str | None) -> None:
        """Hold what derender says of all tokens not sent yet.

        The finish reason goes with tokens only where they are plain text: parsers complete half a call of theirs.
        """
        delta = await self._call(tuple(self._pending), finish)
        self._sent_tokens += len(self._pending)
        self._pending.clear()
        if self._ahead is not None:
            delta, agreed = self._ahead.rest(delta)
            self.agreed = self.agreed and agreed
        self._hold(delta)

    async def _call(self, ids: tuple[int, ...], finish: str | None) -> Delta:
        started = self._clock()
        delta, self._state = await self.derender(ids, finish, self._state)
        self._last_call_s = self._clock()
        self._last_cost_s = self._last_call_s - started
        return delta

    def _hold(self, delta: Delta) -> None:
        """Append a delta to the text not yet released."""
        for part in _TEXTS:
            if part in delta:
                self._segment(part, 0).text += delta[part]
        for entry in delta.get("tool_calls", ()):
            index = entry["index"]
            function = entry.get("function", {})
            segment = self._segment("tool_calls", index)
            if index not in self._calls:
                self._calls[index] = {"id": self._mint(), "name": function.get("name", ""), "arguments": []}
                segment.head = {"id": self._calls[index]["id"], "type": "function", "name": self._calls[index]["name"]}
            segment.text += function.get("arguments", "")

    def _segment(self, part: str, index: int) -> _Segment:
        if not self._held or (self._held[-1].part, self._held[-1].index) != (part, index):
            self._held.append(_Segment(part, index, ""))
        return self._held[-1]

    def _cut(self, stop: str) -> None:
        """Drop a stop string and what its last token brought after it."""
        for segment in reversed(self._held):
            at = segment.text.find(stop)
            if at >= 0:
                segment.text = segment.text[:at]
                return

    def _release(self) -> list[Delta]:
        """Everything held, but for an end of the last segment that could begin a stop string."""
        deltas = []
        for segment in self._held:
            keep = 0
            if segment is self._held[-1] and not self._done:
                keep = max((_overlap(segment.text, stop) for stop in self._stop), default=0)
            text = segment.text[: len(segment.text) - keep]
            rest = segment.text[len(segment.text) - keep :]
            if text or segment.head is not None:
                deltas.append(self._delta(segment, text))
            segment.text, segment.head = rest, None
        self._held = self._held[-1:] if self._held and self._held[-1].text else []
        return deltas

    def _delta(self, segment: _Segment, text: str) -> Delta:
        if segment.part != "tool_calls":
            self._texts.setdefault(segment.part, []).append(text)
            return {segment.part: text}
        self._calls[segment.index]["arguments"].append(text)
        if segment.head is None:
            return {"tool_calls": [{"index": segment.index, "function": {"arguments": text}}]}
        head = segment.head
        call = {"index": segment.index, "id": head["id"], "type": head["type"]}
        return {"tool_calls": [{**call, "function": {"name": head["name"], "arguments": text}}]}


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
