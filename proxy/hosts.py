"""Which Host names a server answers to, against DNS rebinding: a page of another site must not reach it by a name.

A rebinding attack needs a DNS name that the attacker owns, so addresses and `localhost` are always answered; other
names only when they were given. Browsers always send a Host, so none is answered too. It never looks a name up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

LOCAL = "localhost"
ANY = "*"


def host_name(header: str) -> str:
    """The name in a Host header: without port, brackets and final dot, in lower case."""
    host = header.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].removesuffix(".")


def is_allowed(header: str, allowed: Collection[str]) -> bool:
    """Whether a request with this Host header may be answered; `allowed` holds more names, or `*` for all."""
    name = host_name(header)
    return name in ("", LOCAL) or name in allowed or _is_address(name) or ANY in allowed


def allowed_names(given: Iterable[str], *urls: str | None) -> frozenset[str]:
    """The names that were given, and those in `urls` that this server tells others to use."""
    told = (urlsplit(url).hostname for url in urls if url)
    return frozenset(host_name(name) for name in (*given, *(name for name in told if name)))


def _is_address(name: str) -> bool:
    try:
        ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
