"""The list's query string: filters, order and page, parsed and written back.

Everything the list shows is in its address, so a view can be kept and sent. A value that makes no sense is ignored,
never an error: addresses are typed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlencode

from turngate.proxy.viewer.index import SORTS, Filters
from turngate.proxy.wire import RolloutInfo

PAGE_ROLLOUTS = 50
_NUMBERS = {"reward_min": float, "reward_max": float, "version": int}


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the list: `first` and `last` count from 1; `number` of `pages`."""

    rollouts: Sequence[RolloutInfo]
    total: int
    number: int
    pages: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ListQuery:
    """What the address asks for."""

    filters: Filters = field(default_factory=Filters)
    sort: str = "created"
    descending: bool = True
    page: int = 1

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> ListQuery:
        """From query parameters: filters by name, `sort=reward` or `sort=-reward`, `page=2`."""
        values: dict[str, Any] = {}
        for item in fields(Filters):
            text = given.get(item.name, "").strip()
            if text:
                value = _NUMBERS[item.name](text) if _is_number(item.name, text) else text
                if not isinstance(value, str) or item.name not in _NUMBERS:
                    values[item.name] = value
        sort = given.get("sort", "-created")
        name = sort.removeprefix("-")
        if name not in SORTS:
            name, sort = "created", "-created"
        page = given.get("page", "1")
        number = int(page) if page.isascii() and page.isdigit() and len(page) < 9 else 1
        return cls(Filters(**values), name, sort.startswith("-"), max(1, number))

    def cut(self, rollouts: Sequence[RolloutInfo], size: int = PAGE_ROLLOUTS) -> Page:
        """This page of `rollouts`; past the end means the last page."""
        pages = max(1, math.ceil(len(rollouts) / size))
        number = min(self.page, pages)
        start = (number - 1) * size
        some = rollouts[start : start + size]
        return Page(some, len(rollouts), number, pages, start + 1 if some else 0, start + len(some))

    @property
    def active(self) -> dict[str, str]:
        """The filters that are set."""
        return {
            item.name: _plain(value)
            for item in fields(Filters)
            if (value := getattr(self.filters, item.name)) not in ("", None)
        }

    @property
    def sort_value(self) -> str:
        """The `sort` parameter."""
        return ("-" if self.descending else "") + self.sort

    def href(self, **changes: Any) -> str:
        """The address with some parameters changed; None or "" drops one. It leads to page 1 unless `page` is given."""
        values: dict[str, Any] = {**self.active, "sort": self.sort_value}
        values |= changes
        kept = {key: value for key, value in values.items() if value not in ("", None)}
        if kept.get("sort") == "-created":
            del kept["sort"]
        if kept.get("page") == 1:
            del kept["page"]
        return "/?" + urlencode(kept) if kept else "/"

    def sort_href(self, name: str) -> str:
        """Order by `name`, high first; again: low first."""
        return self.href(sort=name if self.sort == name and self.descending else f"-{name}")


def _is_number(name: str, text: str) -> bool:
    if name not in _NUMBERS:
        return False
    try:
        return math.isfinite(_NUMBERS[name](text))
    except ValueError:
        return False


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
