"""Settings from files and command lines: `key=value` overrides, and errors that name the key that was meant.

Shared by `turngate run` and `turngate launch`, so that both are as helpful. Pure: works on mappings and models.
"""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `a.b.c=value` in `raw`, in place; the value is read as YAML.

    Raises:
        ValueError: it is not an override; the message says how one is written.
    """
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ValueError(f"override {override!r}: write it as key.key=value, for example train.steps=6")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not YAML: {error}") from error
    here: Any = raw
    for depth, name in enumerate(path[:-1], 1):
        if here.get(name) is None:
            here[name] = {}
        here = here[name]
        if not isinstance(here, dict):
            raise ValueError(f"override {override!r}: {'.'.join(path[:depth])} is a value, it has no keys below it")
    here[path[-1]] = value


def explain(entry: Mapping[str, Any], root: type[BaseModel]) -> str:
    """One line for one of pydantic's errors in a `root`: the key, what is wrong, and the key that was meant."""
    location = [str(part) for part in entry["loc"]]
    where = ".".join(location)
    if entry["type"] == "extra_forbidden":
        return f"{where}: unknown key{_suggestion(location, root)}"
    if entry["type"] == "missing":
        return f"{where}: missing; set it in the file or as {where}=VALUE"
    return f"{where}: {entry['msg']} (got {entry['input']!r:.80})"


def _suggestion(location: list[str], root: type[BaseModel]) -> str:
    parent, wrong = location[:-1], location[-1]
    model = _model_at(parent, root)
    siblings = list(model.model_fields) if model else []
    elsewhere = {name: path for path, name in reversed(list(_all_keys(root)))}
    near = difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.8)
    if not near and wrong in elsewhere:
        return f", did you mean {elsewhere[wrong]}?"
    near = near or difflib.get_close_matches(wrong, siblings, n=1, cutoff=0.5)
    if near:
        return f", did you mean {'.'.join([*parent, near[0]])}?"
    far = difflib.get_close_matches(wrong, elsewhere, n=1, cutoff=0.75)
    return f", did you mean {elsewhere[far[0]]}?" if far else f"; known here: {', '.join(siblings)}"


def _model_at(location: Sequence[str], root: type[BaseModel]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    for name in location:
        field = model.model_fields.get(name) if model else None
        model = _model_of(field.annotation) if field else None
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_of(part))), None)


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", name
        below = _model_of(field.annotation)
        if below:
            yield from _all_keys(below, f"{prefix}{name}.")
