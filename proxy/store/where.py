"""`--where`: which rollouts are meant, in a small language read by Python's parser and walked by hand.

`reward >= 1 and task in ["a", "b"] and not demonstration`. Comparisons, `in`, `and`, `or`, `not`, numbers, strings and
lists over named fields; nothing is ever evaluated or called. A missing value compares as false with everything but
`None`.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turngate.proxy.store.records import RolloutRecord

FIELDS = (
    *("reward", "label", "task", "harness", "outcome", "cause", "rollout", "group", "policy", "version", "state"),
    *("training", "demonstration"),
)
NESTED = ("rewards", "metrics", "metadata")
"""Mappings whose keys are the rollout's own: `rewards.tests`, `metadata.slot`."""

_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_EQUALITY = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)


class WhereError(ValueError):
    """The expression cannot be read; the message says which part and what there is."""


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed expression. `text` is what was written; empty accepts everything."""

    text: str
    _tree: ast.expr | None = field(repr=False, default=None)

    @classmethod
    def parse(cls, text: str) -> Where:
        """Read an expression.

        Raises:
            WhereError: it is no expression of this language, or names an unknown field.
        """
        if not text.strip():
            return cls("")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise WhereError(
                f'cannot read {text!r}: {error}; write it like: reward >= 1 and harness == "pi"'
            ) from error
        _check(tree)
        return cls(text.strip(), tree)

    @property
    def by_label(self) -> bool:
        """Whether it asks for a turn's or row's label, which one rollout has several of."""
        return self._tree is not None and any(
            isinstance(node, ast.Name) and node.id == "label" for node in ast.walk(self._tree)
        )

    def accepts(self, record: RolloutRecord, label: str | None = None) -> bool:
        """Whether a rollout (and a turn or row of it with this label) is meant.

        Raises:
            WhereError: two values cannot be compared.
        """
        return self._tree is None or bool(_value(self._tree, fields_of(record, label)))


def fields_of(record: RolloutRecord, label: str | None = None) -> dict[str, Any]:
    """What an expression sees of a rollout."""
    new = record.new
    return {
        "reward": record.reward,
        "label": label,
        "task": new.task,
        "harness": new.harness,
        "outcome": record.outcome,
        "cause": record.cause,
        "rollout": record.id,
        "group": new.group,
        "policy": record.policy,
        "version": record.version,
        "state": record.state,
        "training": new.training,
        "demonstration": new.upstream is not None,
        "rewards": record.rewards,
        "metrics": record.metrics,
        "metadata": new.metadata,
    }


def _check(node: ast.expr) -> None:
    """Refuse all but this language, before any rollout is looked at."""
    match node:
        case ast.BoolOp(values=values) | ast.List(elts=values) | ast.Tuple(elts=values):
            _check_all(values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            _check(operand)
        case ast.Compare(left=left, comparators=comparators):
            _check_all([left, *comparators])
        case ast.Attribute(value=ast.Name(id=name)) if name in NESTED:
            pass
        case ast.Attribute(value=ast.Name(id=name)):
            raise WhereError(f"{name}.{node.attr}: only {', '.join(f'{one}.KEY' for one in NESTED)} have keys")
        case ast.Name(id=name) if name in NESTED:
            raise WhereError(f"{name}: name one of its keys, as {name}.KEY")
        case ast.Name(id=name) if name not in FIELDS:
            nested = ", ".join(f"{one}.KEY" for one in NESTED)
            raise WhereError(f"unknown field {name!r}; there are: {', '.join(FIELDS)}, {nested}")
        case ast.Name() | ast.Constant(value=str() | int() | float() | bool() | None):
            pass
        case _:
            raise WhereError(
                f"{ast.unparse(node)!r} is not allowed; use fields, numbers, strings, lists, comparisons, and, or, not"
            )


def _check_all(nodes: list[ast.expr]) -> None:
    for node in nodes:
        _check(node)


def _value(node: ast.expr, fields: Mapping[str, Any]) -> Any:
    match node:
        case ast.BoolOp(op=op, values=values):
            parts: Iterator[bool] = (bool(_value(one, fields)) for one in values)
            return all(parts) if isinstance(op, ast.And) else any(parts)
        case ast.UnaryOp(op=op, operand=operand):
            inner = _value(operand, fields)
            return not inner if isinstance(op, ast.Not) else None if inner is None else -inner
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [_value(one, fields) for one in (left, *comparators)]
            return all(_holds(op, a, b, node) for op, a, b in zip(ops, sides, sides[1:], strict=False))
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            return [_value(one, fields) for one in elts]
        case ast.Attribute(value=ast.Name(id=name), attr=key):
            return fields[name].get(key)
        case ast.Name(id=name):
            return fields[name]
        case ast.Constant(value=value):
            return value
    raise WhereError(f"{ast.unparse(node)!r} is not allowed")


def _holds(op: ast.cmpop, left: Any, right: Any, node: ast.expr) -> bool:
    if not isinstance(op, _EQUALITY) and (left is None or right is None):
        return False
    try:
        return _COMPARE[type(op)](left, right)
    except TypeError as error:
        raise WhereError(f"{ast.unparse(node)!r}: {left!r} and {right!r} cannot be compared so") from error
