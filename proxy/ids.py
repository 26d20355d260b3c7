"""Identifiers: UUIDv7 for rollouts, turns and leases (sortable by time), and secrets for sessions."""

from __future__ import annotations

import secrets
import uuid


def uuid7(utc_ns: int, random: bytes | None = None) -> str:
    """A version 7 UUID (RFC 9562, section 5.7) for a UTC time in ns; `random` is 10 bytes, fresh when left out."""
    noise = int.from_bytes(random if random is not None else secrets.token_bytes(10), "big")
    value = ((utc_ns // 1_000_000) & ((1 << 48) - 1)) << 80
    value |= 0x7 << 76
    value |= (noise >> 68 & 0xFFF) << 64
    value |= 0b10 << 62
    value |= noise & ((1 << 62) - 1)
    return str(uuid.UUID(int=value))


def new_secret(prefix: str) -> str:
    """A secret of 192 bits with a readable prefix, e.g. `tg-s-…`."""
    return f"{prefix}{secrets.token_hex(24)}"
