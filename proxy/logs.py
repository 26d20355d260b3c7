"""Structured logs on standard error, JSON or text, quiet by default, never a secret.

Whatever is logged while a turn is served, by any module, carries that turn's and its rollout's id.
"""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

LogFormat = Literal["json", "text"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_turn: ContextVar[tuple[str, str] | None] = ContextVar("turngate_turn", default=None)


def bind_turn(rollout: str, turn: str) -> None:
    """From here on, in this task and those it starts, records carry these ids."""
    _turn.set((rollout, turn))


def _entry(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, Any]:
    bound = _turn.get()
    entry = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    if bound is not None:
        entry["rollout"], entry["turn"] = bound
    entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
    if record.exc_info:
        entry["trace"] = formatter.formatException(record.exc_info)
    return entry


class JsonFormatter(logging.Formatter):
    """A record as `{"time", "level", "logger", "event", "rollout", "turn", …extra}`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry = _entry(self, record)
        try:
            return orjson.dumps(entry, default=str).decode()
        except TypeError:  # half characters, or numbers beyond 64 bits: a line all the same
            return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """A record as `time level logger event key=value …`, a trace behind it."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        entry = _entry(self, record)
        head = f"{entry.pop('time')} {entry.pop('level'):7} {entry.pop('logger')} {entry.pop('event')}"
        trace = entry.pop("trace", None)
        words = "".join(f" {key}={value}" for key, value in entry.items())
        return head + words + (f"\n{trace}" if trace else "")


def setup_logs(level: str = "info", form: LogFormat = "json") -> None:
    """Send every log of this process to standard error; libraries only from warning up, the server from error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("turngate").setLevel(level.upper())
    # uvicorn warns of what clients send (no HTTP, upgrades): anyone could fill the log with it, and is answered anyway
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING if level == "debug" else logging.ERROR)
