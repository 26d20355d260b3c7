"""Which sampling a turn gets: the session's policy over the agent's wishes over the engine's defaults.

Pure: takes what was asked and what is allowed, gives vLLM's `sampling_params` and a note of every change, so the
record shows both. It must never let an agent's setting silently win over the policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turngate.proxy.errors import BadRequest
from turngate.proxy.wire import SAMPLING_KEYS

NUMBERS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
}
WHOLE = ("top_k", "seed", "min_tokens")
SHAPING = ("logit_bias", "bad_words", "min_tokens", "ignore_eos")
"""Wishes that change the sampled distribution itself; a turn that has them is flagged."""

LIMITS = ("max_tokens", "max_completion_tokens")
ASKED_KEYS = (
    *NUMBERS, *WHOLE, "stop", "stop_token_ids", "ignore_eos", "logit_bias", "bad_words",
    "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "n", "tool_choice", "response_format",
    "structured_outputs",
)  # fmt: skip
POLICY_KEYS = frozenset(SAMPLING_KEYS)


@dataclass(frozen=True, slots=True)
class Sampling:
    """`params` goes to the engine, `asked` is the agent's own, `stop` the stop strings, `notes` what was changed."""

    params: dict[str, Any]
    asked: dict[str, Any]
    stop: tuple[str, ...]
    notes: tuple[str, ...]


def check_policy(policy: Mapping[str, Any]) -> None:
    """Refuse a session policy with unknown or impossible entries.

    Raises:
        BadRequest: naming the key and what is allowed.
    """
    unknown = sorted(set(policy) - POLICY_KEYS)
    if unknown:
        raise BadRequest(f"sampling.{unknown[0]} is no sampling setting; use one of {', '.join(sorted(POLICY_KEYS))}")
    _check(policy, "sampling.")


def asked_by(body: Mapping[str, Any], *, training: bool) -> dict[str, Any]:
    """The sampling part of an agent's request, checked.

    Raises:
        BadRequest: a value out of range; `n > 1` or a forced `tool_choice` in a training session.
    """
    asked = {key: body[key] for key in ASKED_KEYS if body.get(key) is not None}
    _check(asked, "")
    n = asked.get("n", 1)
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise BadRequest(f"n must be a whole number of at least 1, not {n!r}", param="n")
    if n > 1:
        raise BadRequest("n > 1 is not supported: open one rollout for each sample and ask with n=1", param="n")
    choice = asked.get("tool_choice", "auto")
    if choice not in ("auto", "none") and training:
        raise BadRequest(
            f"tool_choice {choice!r} forces tokens the policy did not choose, which cannot be trained: "
            'use "auto" or "none", or open the rollout with training=false',
            param="tool_choice",
        )
    return asked


def is_formed(asked: Mapping[str, Any]) -> bool:
    """Whether the agent wants an answer of a given form: JSON, or a schema of it."""
    form = asked.get("response_format")
    return isinstance(form, Mapping) and form.get("type") != "text"


def resolve(
    engine_defaults: Mapping[str, Any], asked: Mapping[str, Any], policy: Mapping[str, Any], room_tokens: int
) -> Sampling:
    """The engine's `sampling_params` for one turn.

    Args:
        engine_defaults: `sampling_params` as the engine rendered them (its generation defaults, structured output).
        asked: from `asked_by`.
        policy: the session's policy; wins over `asked`.
        room_tokens: context left after the prompt, at least 1.
    """
    params = {key: value for key, value in engine_defaults.items() if value is not None}
    for key in (*NUMBERS, *WHOLE, "stop_token_ids", "ignore_eos", "logit_bias", "bad_words"):
        if key in asked:
            params[key] = asked[key]
    stop = stop_strings(asked, "")
    wanted = min((asked[key] for key in LIMITS if key in asked), default=room_tokens)
    notes = [f"shaped:{key}" for key in SHAPING if asked.get(key) or policy.get(key)]
    if is_formed(asked):
        notes.append("shaped:response_format")
    if asked.get("structured_outputs"):
        notes.append("shaped:structured_outputs")
    for key, value in policy.items():
        if key in asked and key not in ("stop", "max_tokens") and asked[key] != value:
            notes.append(f"policy:{key}")
        if key == "stop":
            stop = tuple(dict.fromkeys((*stop, *stop_strings(policy, "sampling."))))
        elif key == "max_tokens":
            wanted = wanted if value is None else min(wanted, value)
        elif value is None:
            params.pop(key, None)
        else:
            params[key] = value
    if wanted > room_tokens:
        notes.append("clamped:max_tokens")
        wanted = room_tokens
    if (params.get("min_tokens") or 0) > wanted:
        notes.append("clamped:min_tokens")  # engines refuse it, and agents repeat what is refused
        params["min_tokens"] = wanted
    params.update(max_tokens=wanted, n=1)
    params.pop("stop", None)
    if stop:
        params["stop"] = list(stop)
    return Sampling(params, dict(asked), stop, tuple(notes))


def stop_strings(source: Mapping[str, Any], prefix: str) -> tuple[str, ...]:
    """The `stop` entry as a tuple of non-empty strings.

    Raises:
        BadRequest: it is neither a string nor a list of strings.
    """
    stop = source.get("stop")
    if stop is None:
        return ()
    items = [stop] if isinstance(stop, str) else stop
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise BadRequest(f"{prefix}stop must be a string or a list of non-empty strings", param="stop")
    return tuple(items)


def _check(values: Mapping[str, Any], prefix: str) -> None:
    _check_numbers(values, prefix)
    stop_strings(values, prefix)
    for key in LIMITS:
        value = values.get(key)
        if value is not None and (not _is_whole(value) or value < 1):
            raise BadRequest(f"{prefix}{key} must be a whole number of at least 1, not {value!r}", param=key)
    for key, (suits, words) in SHAPES.items():
        value = values.get(key)
        if value is not None and not suits(value):
            raise BadRequest(f"{prefix}{key} must be {words}, not {value!r:.100}", param=key)


def _check_numbers(values: Mapping[str, Any], prefix: str) -> None:
    for key, (low, high) in NUMBERS.items():
        value = values.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise BadRequest(f"{prefix}{key} must be a number from {low} to {high}, not {value!r}", param=key)
    for key in WHOLE:
        value = values.get(key)
        if value is not None and not _is_whole(value):
            raise BadRequest(f"{prefix}{key} must be a whole number, not {value!r}", param=key)
    if not -1 <= (values.get("top_k") or 0) < 2**31:
        raise BadRequest(
            f"{prefix}top_k must be from -1 (all, as 0 is) to {2**31 - 1}, not {values['top_k']}", param="top_k"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**63 - 1


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_whole(one) for one in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_bias(value: Any) -> bool:
    return isinstance(value, dict) and all(
        str(key).isdecimal() and isinstance(one, int | float) and not isinstance(one, bool)
        for key, one in value.items()
    )


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stop_token_ids": (_is_ids, "a list of token ids"),
    "bad_words": (_is_texts, "a list of strings"),
    "logit_bias": (_is_bias, "an object from token ids to numbers"),
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "min_tokens": (lambda value: value >= 0, "at least 0"),
}
