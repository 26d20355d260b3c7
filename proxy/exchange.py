"""One turn from request to commit: plan, prompt, sample, stream, keep, and only then end the answer.

The order is the contract: nothing reaches the agent as finished before the store has it, and a client that goes away
cancels the generation (closing the engine's stream aborts it in vLLM).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np

from turngate.proxy import wire
from turngate.proxy.ask import Answer, Ask, Usage
from turngate.proxy.budgets import CONTEXT_OVERFLOW, room_for
from turngate.proxy.call_names import with_named_calls
from turngate.proxy.demonstration import NotImitable, completion_ids
from turngate.proxy.engine.derenderer import AnswerStream
from turngate.proxy.engine.errors import (
    ContextOverflow,
    EngineBusy,
    EngineError,
    EngineFault,
    EngineRefused,
    EngineUnavailable,
)
from turngate.proxy.engine.types import GenerateCall
from turngate.proxy.engine.wire import derender_request
from turngate.proxy.errors import BadRequest, EngineAway, EngineTrouble, GatewayRefusal, Gone, TooMany
from turngate.proxy.gateway import Gateway
from turngate.proxy.ids import uuid7
from turngate.proxy.labels import Speaker, after_compaction, speaker
from turngate.proxy.metrics import Course
from turngate.proxy.prompting import Prompt, build_prompt, placed
from turngate.proxy.reattach import Telling
from turngate.proxy.sampled import Sampled
from turngate.proxy.sampling import Sampling, is_formed, resolve
from turngate.proxy.sessions import ENGINE_FAULT, TEACHER_FAULT, Session
from turngate.proxy.splice import Plan
from turngate.proxy.teachers import TeacherFault, scripted
from turngate.proxy.transparent import RERENDERED, TransparentAnswer
from turngate.proxy.turns import NO_VERSION, IntArray, Mode, Span, Timings, Turn

log = logging.getLogger("turngate.turns")

TERMINAL_TEXT = {
    "context_overflow": "The context window is full, so this run ends here.",
    "deadline": "The time for this run is over, so it ends here.",
    "budget:requests": "The request budget of this run is spent, so it ends here.",
    "budget:context_tokens": "The context budget of this run is spent, so it ends here.",
    "budget:generated_tokens": "The token budget of this run is spent, so it ends here.",
    "budget:wall_clock": "The time budget of this run is spent, so it ends here.",
    "script_over": "The script of this run is over, so it ends here.",
}


class _Over(Exception):
    """The run ends here, with a normal last answer."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Exchange:
    """One turn being made. `open()` may refuse; then iterate `deltas()`; then `answer` is set and the turn is kept.

    `telling`, where it is set, says who listens: an answer that nobody waits for is not kept, nor its fault told.
    """

    answer: Answer
    _prompt: Prompt
    _said: tuple[Mapping[str, Any], str]

    def __init__(self, gateway: Gateway, session: Session, ask: Ask, headers: Mapping[str, str]) -> None:
        self._gateway = gateway
        self._session = session
        self._ask = ask
        self._headers = headers
        self._received_ns = time.monotonic_ns()
        self._received_at_ns = gateway.utc_ns()
        self._terminal: str | None = None
        self._pinned: tuple[str, int] | None = None
        self._derender_ns = 0
        self._taught = session.new.upstream is not None
        self._flags: tuple[str, ...] = ()
        self.telling: Telling | None = None
        self.id = uuid7(self._received_at_ns)

    async def open(self) -> None:
        """Plan the turn and build its prompt; after this only the engine can fail.

        Raises:
            GatewayRefusal: with what to do about it.
        """
        session, ask, gateway = self._session, self._ask, self._gateway
        if self._taught and not gateway.exact:
            raise BadRequest("demonstrations need an engine that renders prompts (vLLM's --enable-scale-out)")
        self._terminal = session.spent(time.monotonic_ns())
        if self._terminal:
            return
        self._plan: Plan = session.index.plan(ask.messages, ask.tools)
        self._plan = after_compaction(self._plan, session.turns)
        session.tools_seen |= bool(ask.tools)
        policy, version = session.policy, session.version
        if session.new.pin == "turn":
            version = gateway.versions.current(policy)
        self._model, adapter = gateway.versions.model_name(policy, version)
        self._span_of = (policy, version, adapter)
        gateway.versions.pin(policy, version)  # from now on: a publication may come while the prompt is rendered
        self._pinned = (policy, version)
        try:
            self._engines = gateway.engines.of(session.id)
            if gateway.exact:
                self._prompt = await build_prompt(self._engines, gateway.facts, gateway.stubs, session, ask, self._plan)
        except ContextOverflow:
            self._terminal = CONTEXT_OVERFLOW
            return
        except EngineError as error:
            raise self._refusal(error) from error
        known, limit = session.path_tokens(self._plan), gateway.capabilities.max_model_len
        if gateway.exact:
            known = len(self._prompt.ids)
        else:
            limit += known  # what is left of its context, only the engine can say
        self._room = room_for(session.new.budgets, limit, known, session.generated_tokens)
        if self._room.tokens < 1:
            self._terminal = self._room.cause
            return
        defaults = self._prompt.engine_defaults if gateway.exact else {}
        self._sampling: Sampling = resolve(defaults, ask.asked, session.sampling, self._room.tokens)

    @property
    def prompt_tokens(self) -> int | None:
        """How many tokens the prompt has, after `open()`; None where only the engine's answer tells."""
        if self._terminal:
            return 0
        return len(self._prompt.ids) if self._gateway.exact else None

    async def deltas(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """The pieces of the assistant message, as they are sampled; ends after the turn is committed.

        Raises:
            EngineTrouble: the engine failed; nothing was kept.
            Gone: the rollout was finished meanwhile.
        """
        if self._terminal:
            yield self._end_run(self._terminal)
            return
        dispatched_ns = time.monotonic_ns()
        sampled = Sampled()
        produce = self._exact if self._gateway.exact else self._transparent
        if self._taught:
            produce = self._demonstrated
        try:
            async with aclosing(produce(sampled)) as deltas:
                async for delta in deltas:
                    if self._session.closed:
                        raise self._finished()
                    yield delta
        except ContextOverflow:
            yield self._end_run(CONTEXT_OVERFLOW)
            return
        except _Over as over:
            yield self._end_run(over.cause)
            return
        except (TeacherFault, NotImitable):
            self._session.flags.add(TEACHER_FAULT)
            raise
        except EngineError as error:
            raise self._refusal(error) from error
        done_ns = time.monotonic_ns()
        if self.telling is not None:
            await self.telling.wanted()
        message, finish_reason = self._said
        if self._ask.calls_before is not None:
            message = with_named_calls(message, self._ask.calls_before)
        turn = await self._keep(sampled, message, dispatched_ns, done_ns)
        usage = Usage(turn.prompt_tokens, len(turn.completion_ids))
        self.answer = Answer(
            message, finish_reason, usage, turn.stop_reason if isinstance(turn.stop_reason, str) else None
        )

    async def close(self) -> None:
        """Let go of the adapter version; the answer is over, however it ended."""
        if self._pinned is not None:
            pinned, self._pinned = self._pinned, None
            self._gateway.versions.unpin(*pinned)

    async def _exact(self, sampled: Sampled) -> AsyncGenerator[Mapping[str, Any], None]:
        """Token in, token out."""
        call = GenerateCall(
            model=self._model,
            ids=self._prompt.ids,
            sampling_params=self._sampling.params,
            extra=dict(self._prompt.extra),
            request_id=self.id,
            top_logprobs=self._session.new.top_logprobs,
            interval_tokens=self._interval_tokens(),
        )
        about = derender_request({"tools": self._ask.tools, **self._ask.render_body})
        stream = AnswerStream(
            self._engines.derenderer(self._model, self.id, about, self._prompt.ids),
            stop=self._sampling.stop,
            clock=time.monotonic,
            named_choice=isinstance(self._ask.render_body.get("tool_choice"), Mapping),
            ends=self._gateway.ends,
            whole=not self._ask.stream,
            ahead=self._engines.text_ahead(self._prompt.ids),
            endings=self._gateway.endings,
        )
        async with aclosing(self._engines.generate(call)) as chunks:
            async for chunk in chunks:
                if not sampled.finish_reason and not sampled.ids:
                    yield {"role": "assistant", "content": ""}
                sampled.take(chunk)
                if self._session.closed:
                    raise self._finished()
                feeding_ns = time.monotonic_ns()
                deltas = await stream.feed(chunk)
                self._derender_ns += time.monotonic_ns() - feeding_ns
                for delta in deltas:
                    yield delta
        if not stream.agreed:
            log.warning("text_ahead_differs", extra={"rollout": self._session.id, "turn": self.id})
            self._gateway.replicas.set_tokenizer(None, self._gateway.replicas.all[0].markers)
        if sampled.stop_reason is None:
            sampled.stop_reason = stream.stop_string
        self._said = stream.message(), stream.finish_reason or "stop"

    async def _transparent(self, sampled: Sampled) -> AsyncGenerator[Mapping[str, Any], None]:
        """Through plain chat completions; where the prompt stands in the tree is known only afterwards."""
        room = self._gateway.capabilities.max_model_len
        stream = TransparentAnswer(self._engines, self._model, self._ask, self._sampling, room)
        started = False
        async with aclosing(stream.deltas(sampled)) as deltas:
            async for delta in deltas:
                yield delta if started else {"role": "assistant", "content": "", **delta}
                started = True
        self._said = stream.message(), stream.finish_reason
        cause = self._plan.break_cause or RERENDERED
        self._prompt = placed(self._session, stream.prompt_ids, self._plan, cause, self._ask.messages, {}, {})

    async def _demonstrated(self, sampled: Sampled) -> AsyncGenerator[Mapping[str, Any], None]:
        """What the teacher says, rendered as the student would have written it."""
        session, ask, upstream = self._session, self._ask, self._session.new.upstream
        if isinstance(upstream, wire.OpenAITeacher):
            told = await self._gateway.teachers.ask(upstream, ask)
        else:
            assert upstream is not None
            next_turn = scripted(upstream, ask, main=self._speaker().label == "main")
            if next_turn is None:
                raise _Over("script_over")
            told = next_turn

        async def render(body: Mapping[str, Any]) -> IntArray:
            return (await self._engines.render({**ask.render_body, **body})).ids

        unseen = not any(turn.response.get("tool_calls") for turn in session.turns.values())
        ids, flags = await completion_ids(render, self._gateway.facts, ask, self._prompt.ids, told, check_calls=unseen)
        if len(ids) > self._room.tokens:
            raise _Over(self._room.cause)
        sampled.ids, sampled.logprobs = ids.tolist(), [math.nan] * len(ids)
        sampled.first_token_ns = time.monotonic_ns()
        sampled.finish_reason = "length" if told.cut else "stop"
        self._flags = flags
        calls = told.message.get("tool_calls") or ()
        self._said = told.message, "length" if told.cut else "tool_calls" if calls else "stop"
        yield {"role": "assistant", "content": told.message["content"] or ""}
        for index, call in enumerate(calls):
            yield {"tool_calls": [{"index": index, **call}]}

    async def _keep(self, sampled: Sampled, message: Mapping[str, Any], dispatched_ns: int, done_ns: int) -> Turn:
        timings = Timings(
            self._received_at_ns, self._received_ns, dispatched_ns, sampled.first_token_ns or done_ns, done_ns
        )
        gateway, session, prompt, ask = self._gateway, self._session, self._prompt, self._ask
        committing_ns = time.monotonic_ns()
        top_ids, top_logprobs = sampled.packed_top(session.new.top_logprobs)
        continued = ("continued",) if len(self._engines.stretches) > 1 else ()

        def make(seq: int) -> Turn:
            who = self._speaker()
            return Turn(
                id=self.id,
                rollout=session.id,
                seq=seq,
                kind=prompt.kind,
                base=prompt.base,
                base_tokens=prompt.base_tokens,
                break_cause=prompt.break_cause,
                tail_ids=prompt.tail_ids,
                completion_ids=np.asarray(sampled.ids, dtype=np.int32),
                logprobs=np.asarray(sampled.logprobs, dtype=np.float32),
                spans=self._spans(len(sampled.ids)),
                finish_reason=sampled.finish_reason,
                stop_reason=sampled.stop_reason,
                timings=timings,
                label=who.label,
                label_reason=who.reason,
                agent=who.agent,
                parent=who.parent,
                mode=self._mode,
                engine=self._engines.engine,
                top_ids=top_ids,
                top_logprobs=top_logprobs,
                sampling_asked=self._sampling.asked,
                sampling_used={} if self._taught else self._sampling.params,
                request={
                    "messages": list(prompt.new_messages),
                    "tools": None if prompt.kind == "spliced" or not ask.tools else list(ask.tools),
                    "params": dict(ask.params),
                },
                response=message,
                flags=self._flags if self._taught else (*self._sampling.notes, *self._ask.notes, *continued),
            )

        def remember(turn: Turn) -> None:
            if self._room.cut(len(turn.completion_ids), turn.finish_reason):
                session.flags.add(self._room.cause)
            session.index.record(turn.id, self._plan, message, kind=turn.kind)
            gateway.turn_kept(turn, Course(self._derender_ns, committing_ns, time.monotonic_ns()))

        return await self._gateway.sessions.keep(session, make, remember)

    @property
    def _mode(self) -> Mode:
        if self._taught:
            return "demonstration"
        return "exact" if self._gateway.exact else "transparent"

    def _speaker(self) -> Speaker:
        """Who spoke, decided when the turn is kept: a title may be asked for before the main conversation is known."""
        session = self._session
        return speaker(
            self._ask.messages,
            self._ask.tools,
            self._headers,
            session.turns,
            self._plan,
            main_tools=session.tools_seen or session.new.main_tools,
            formed=is_formed(self._ask.asked),
        )

    def _interval_tokens(self) -> int:
        """How many tokens the engine may gather in an event: each event costs both sides about as much as any other."""
        if not self._gateway.capabilities.takes_interval:
            return 1
        last = next(reversed(self._session.turns.values()), None)
        return self._gateway.pace.interval_tokens(last, stream=self._ask.stream)

    def _finished(self) -> Gone:
        return Gone(f"rollout {self._session.id} was finished while this turn was being sampled")

    def _spans(self, tokens: int) -> tuple[Span, ...]:
        """One span, or one for each engine that had a part in the answer."""
        if self._taught:
            return (Span(0, tokens, self._session.policy, NO_VERSION, None),)
        parts = self._engines.stretches
        if len(parts) < 2:
            return (Span(0, tokens, *self._span_of),)
        return tuple(Span(part.start, part.end, *self._span_of, part.engine) for part in parts)

    def _refusal(self, error: EngineError) -> GatewayRefusal:
        """What to tell the agent, without where the engines are; a fault of theirs is noted on the rollout."""
        self._gateway.metrics.engine_error(error)
        heard = self.telling is None or self.telling.listeners
        if heard and isinstance(error, EngineUnavailable | EngineFault) and not isinstance(error, EngineBusy):
            self._session.flags.add(ENGINE_FAULT)
        return engine_refusal(error, self._gateway.replicas.anonymous(str(error)))

    def _end_run(self, cause: str) -> Mapping[str, Any]:
        """A spent budget or a full context: a normal last answer, because a 400 sends agents into endless loops."""
        self._session.flags.add(cause)
        self._gateway.metrics.run_ended(cause)
        message = {"role": "assistant", "content": TERMINAL_TEXT[cause]}
        self.answer = Answer(message=message, finish_reason="stop", usage=Usage(0, 0))
        return message


def engine_refusal(error: EngineError, words: str) -> GatewayRefusal:
    """An engine's failure in the gateway's words; `words` are the engine's, fit for an agent."""
    if isinstance(error, EngineRefused) and error.status != 404:
        return BadRequest(f"the engine refused the request: {words}", code="engine_refused")
    if isinstance(error, EngineBusy):
        return TooMany(f"all engines are full, ask again later: {words}", code="engines_full")
    if isinstance(error, EngineUnavailable | EngineRefused):
        return EngineAway(f"no engine can take the turn now: {words}")
    return EngineTrouble(f"the engine failed: {words}")
