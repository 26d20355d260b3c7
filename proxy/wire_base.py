"""What all models of the administration wire have in common: strict keys, bounded numbers, values that can be kept.

A module of its own so that the wire can be written in several. It must never know a particular body.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from turngate.proxy.plain import plain


class Wire(BaseModel):
    """Base of all wire models: unknown keys are errors, so a typo never passes silently."""

    model_config = ConfigDict(extra="forbid")


MAX_COUNT = 2**53 - 1
"""Largest whole number that every JSON reader keeps exactly."""

MAX_WAIT_S = 1e9
"""Longest time to wait for anything, in seconds (31 years): what stands for "no limit"."""


_FREE = frozenset({"metadata", "metrics", "rows"})  # values that nothing here reads


class Sent(Wire):
    """Base of what others send: a type is what it is, so that neither `true` nor "5" passes for a number."""

    model_config = ConfigDict(strict=True)


class Asked(Sent):
    """Base of request bodies: what is kept must be writable again, so half characters and NaN in free values go."""

    @model_validator(mode="before")
    @classmethod
    def _writable(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: plain(one, nulls=key in _FREE) for key, one in value.items()}
