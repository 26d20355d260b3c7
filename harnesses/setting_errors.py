"""Settings from files and command lines: `key=value` overrides, and errors that name the key that was meant.

Shared by `turngate run` and `turngate launch`, so that both are as helpful. Pure: works on mappings and models.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from turngate.harnesses.setting_files import parse_yaml


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
        value = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"override {override!r}: the value is not YAML: {error}") from error
    here: Any = raw
    for depth, name in enumerate(path[:-1], 1):
        if here.get(name) is None:
            here[name] = {}
        here = here[name]
        if not isinstance(here, dict):
            raise ValueError(f"override {override!r}: {'.'.join(path[:depth])} is a value, it has no keys below it")
    here[path[-1]] = value


def explain(
    error: ValidationError, root: type[BaseModel], *, file: Path | None = None, overrides: Sequence[str] = ()
) -> str:
    """All of pydantic's errors in a `root`, a line each: the key, what is wrong, and the key that was meant.

    A line begins with `file`, where the values are from, unless one of the `overrides` set that key.
    """
    said = {override.partition("=")[0].strip() for override in overrides}
    lines: dict[str, None] = {}
    for entry in _of_the_branch_that_was_meant([_Entry.of(one, root) for one in error.errors()]):
        where = ".".join(entry.location)
        overridden = any(where == key or where.startswith(f"{key}.") for key in said)
        line = f"{where}: {_words(entry, root)}" if where else _words(entry, root)
        lines[line if file is None or overridden else f"{file}: {line}"] = None
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One of pydantic's errors. `location` are keys alone; `union` is the place of a value that may be of several
    kinds, `branch` the kind that this error is about: a model, or None for a plain value."""

    location: tuple[str, ...]
    kind: str
    message: str
    value: Any
    union: tuple[str, ...] | None = None
    branch: type[BaseModel] | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any], root: type[BaseModel]) -> _Entry:
        """Tells keys from the names of kinds, which pydantic puts between them."""
        model: type[BaseModel] | None = root
        keys: list[str] = []
        union, branch, several = None, None, False
        for part in map(str, entry["loc"]):
            if several:
                union, several = tuple(keys), False
                branch = model if model is not None and part == model.__name__ else None
                continue
            keys.append(part)
            field = model.model_fields.get(part) if model else None
            model = _model_of(field.annotation) if field else None
            several = field is not None and _has_several_kinds(field.annotation)
        return cls(tuple(keys), entry["type"], entry["msg"], entry["input"], union, branch)


def _of_the_branch_that_was_meant(entries: Sequence[_Entry]) -> list[_Entry]:
    """Without the errors about kinds that a value was never meant to be: a mapping is meant to be the model."""
    no_mapping = {entry.union for entry in entries if entry.kind == "model_type"}
    return [
        entry
        for entry in entries
        if entry.union is None or (entry.branch is None) == (entry.union in no_mapping) or entry.kind == "model_type"
    ]


def _words(entry: _Entry, root: type[BaseModel]) -> str:
    location = list(entry.location)
    if entry.kind == "extra_forbidden":
        return f"unknown key{_suggestion(location, root)}"
    if entry.kind == "missing":
        where = ".".join(location)
        return f"missing; set it in the file or as {where}=VALUE"
    if entry.kind == "model_type" and entry.branch is not None:
        return f"or a mapping with the keys {', '.join(entry.branch.model_fields)}"
    return f"{entry.message.removeprefix('Value error, ')} (got {entry.value!r:.80})"


def _has_several_kinds(annotation: Any) -> bool:
    """Whether a field takes values of more than one kind, None aside."""
    kinds = [part for part in typing.get_args(annotation) if part is not type(None)]
    return typing.get_origin(annotation) in (typing.Union, types.UnionType) and len(kinds) > 1


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
