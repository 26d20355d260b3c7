"""Numbers and times as short words for people; used by the templates as filters.

One place, so that a duration looks the same on every page. A missing value is an en dash, never 0.
"""

from __future__ import annotations

from datetime import UTC, datetime

MISSING = "–"


def number(value: float | None, digits: int = 0) -> str:
    """1234567 as `1,234,567`."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def short(value: float | None) -> str:
    """1234567 as `1.23M`; below 10,000 in full."""
    if value is None:
        return MISSING
    for limit, scale, unit in ((999.5e6, 1e9, "B"), (999.5e3, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / scale:.3g}{unit}"
    return f"{value:,.0f}"


def percent(value: float | None) -> str:
    """0.256 as `25.6 %`, without a useless `.0`."""
    return MISSING if value is None else f"{value * 100:.1f}".removesuffix(".0") + " %"


def reward(value: float | None) -> str:
    """Up to three decimals: 1, 0.25, 0.333."""
    return MISSING if value is None else (f"{value:.3f}".rstrip("0").rstrip(".") or "0").replace("-0", "0", value == 0)


def milliseconds(value: float | None) -> str:
    """Milliseconds as `8 ms`, `1.24 s`, `3 m 20 s` or `2 h 5 m`."""
    if value is None:
        return MISSING
    if value < 1000:
        return f"{value:.0f} ms"
    seconds = value / 1000
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} m {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} m"


def nanoseconds(value: int | None) -> str:
    """Like `milliseconds`, from ns."""
    return MISSING if value is None else milliseconds(value / 1e6)


def utc(at_ns: int | None) -> str:
    """UTC time to the second."""
    return MISSING if at_ns is None else f"{datetime.fromtimestamp(at_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S}"


def clock(at_ns: int | None) -> str:
    """UTC time of day."""
    return MISSING if at_ns is None else f"{datetime.fromtimestamp(at_ns / 1e9, UTC):%H:%M:%S}"


def short_id(value: str) -> str:
    """The last 8 characters: the random end of a UUIDv7, which differs where its head (the time) does not."""
    return value[-8:]


def group_tail(group: str, task: str) -> str:
    """The part of a group's name that its task does not say, its last 8 characters when it is long."""
    tail = group.removeprefix(task).lstrip("-_/:. ") or group
    return tail if len(tail) <= 12 else "…" + tail[-8:]


FILTERS = {
    "group_tail": group_tail,
    "number": number,
    "short": short,
    "percent": percent,
    "reward": reward,
    "ms": milliseconds,
    "ns": nanoseconds,
    "utc": utc,
    "clock": clock,
    "short_id": short_id,
}
