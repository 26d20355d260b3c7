"""OpenTelemetry spans, when asked for: a rollout is one trace, each of its turns a span with its parts below.

Spans are made after a turn was committed, from the times it has anyway, so serving it costs nothing more; without
`--otel` this module is not imported. The trace's id is the rollout's id without its dashes. No text goes into a span.
"""

from __future__ import annotations

import uuid
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from turngate.proxy.metrics import Course
from turngate.proxy.store.records import RolloutRecord
from turngate.proxy.turns import Turn

_LOW_64 = (1 << 64) - 1


class _Ids(RandomIdGenerator):
    """Random ids, but for the span of a whole rollout: turns name it as their parent before it exists."""

    rollout: str | None = None

    def generate_span_id(self) -> int:
        """See RandomIdGenerator."""
        return super().generate_span_id() if self.rollout is None else trace_of(self.rollout) & _LOW_64

    def generate_trace_id(self) -> int:
        """See RandomIdGenerator."""
        return super().generate_trace_id() if self.rollout is None else trace_of(self.rollout)


class TurnTracer:
    """Makes the spans and gives them to `exporter` from a thread of its own. Used by the event loop alone."""

    def __init__(self, exporter: SpanExporter, run: str) -> None:
        self._ids = _Ids()
        resource = Resource.create({SERVICE_NAME: "turngate", "turngate.run": run})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("turngate")

    def turn(self, turn: Turn, course: Course) -> None:
        """The spans of a committed turn: render, generate with derender in it, commit."""
        times = turn.timings
        utc_ns = times.received_at_ns - times.received_ns
        span = self._turn_span(turn.rollout, turn.id, times.received_at_ns)
        served = turn.spans[-1] if turn.spans else None
        facts: dict[str, Any] = {
            "turngate.kind": turn.kind,
            "turngate.label": turn.label,
            "turngate.seq": turn.seq,
            "turngate.engine": turn.engine,
            "turngate.version": served.version if served else 0,
            "gen_ai.request.model": served.policy if served else "",
            "gen_ai.response.finish_reasons": [turn.finish_reason],
            "gen_ai.usage.input_tokens": turn.prompt_tokens,
            "gen_ai.usage.output_tokens": len(turn.completion_ids),
        }
        if turn.break_cause:
            facts["turngate.break_cause"] = turn.break_cause
        span.set_attributes(facts)
        inside = trace.set_span_in_context(span)

        def part(name: str, begin_ns: int, end_ns: int, within: Any, **attributes: Any) -> Any:
            made = self._tracer.start_span(name, within, start_time=utc_ns + begin_ns, attributes=attributes)
            made.end(utc_ns + end_ns)
            return trace.set_span_in_context(made)

        rendered = {"turngate.rendered_tokens": len(turn.tail_ids)}
        part("render", times.received_ns, times.dispatched_ns, inside, **rendered)
        generate = part("generate", times.dispatched_ns, times.done_ns, inside)
        busy = {"turngate.busy_ms": course.derender_ns / 1e6}
        part("derender", times.first_token_ns, times.done_ns, generate, **busy)
        part("commit", course.committing_ns, course.committed_ns, inside)
        span.end(utc_ns + course.committed_ns)

    def refused(self, rollout: str, turn: str, code: str, now_ns: int) -> None:
        """The span of a turn that failed; when it came in is in its id, to the ms."""
        span = self._turn_span(rollout, turn, (uuid.UUID(turn).int >> 80) * 1_000_000)
        span.set_status(Status(StatusCode.ERROR, code))
        span.set_attribute("error.type", code)
        span.end(now_ns)

    def rollout(self, record: RolloutRecord) -> None:
        """The span that all turns of a finished rollout are below."""
        self._ids.rollout = record.id
        try:
            span = self._tracer.start_span("rollout", Context(), start_time=record.created_at_ns)
        finally:
            self._ids.rollout = None
        facts = {"task": record.new.task, "group": record.new.group, "harness": record.new.harness}
        facts |= {"outcome": record.outcome, "cause": record.cause}
        span.set_attributes({f"turngate.{key}": value for key, value in facts.items() if value is not None})
        if record.reward is not None:
            span.set_attribute("turngate.reward", record.reward)
        span.end(record.finished_at_ns)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def _turn_span(self, rollout: str, turn: str, begin_ns: int) -> Span | NonRecordingSpan:
        whole = trace_of(rollout)
        parent = SpanContext(whole, whole & _LOW_64, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        within = trace.set_span_in_context(NonRecordingSpan(parent))
        facts = {"turngate.rollout": rollout, "turngate.turn": turn}
        span: Any = self._tracer.start_span("turn", within, kind=SpanKind.SERVER, start_time=begin_ns, attributes=facts)
        return span  # type: ignore[no-any-return]


def trace_of(rollout: str) -> int:
    """A rollout's trace id: its own 128 bits."""
    return uuid.UUID(rollout).int


def otlp_tracer(endpoint: str, run: str) -> TurnTracer:
    """A tracer that sends to an OTLP receiver over HTTP; `endpoint` is its base, such as http://127.0.0.1:4318."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return TurnTracer(OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces"), run)
