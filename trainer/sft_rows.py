"""The rows of a supervised fine-tuning: a store's own tokens and masks, as `turngate export` writes them.

Nothing is tokenised, cut or padded here: a label is the row's id where its mask says so, else -100. A row that does not
fit is left out whole and counted.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from turngate.trainer.errors import NoStore, TrainerError
from turngate.trainer.summary import CLI

IGNORED = -100
"""What TRL's loss leaves out."""
EXPORT_USAGE = 2
"""Exit status of `turngate export` where there is no such store, or `--where` is no expression."""


class NoRows(TrainerError):
    """There is nothing to learn; the message says what was looked for."""


@dataclass(frozen=True, slots=True)
class SftRow:
    """One row: `ids` and `labels` of the same length, a label being the id or `IGNORED`."""

    rollout: str
    task: str
    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def learnt_tokens(self) -> int:
        """How many tokens are learnt; the first of a row has nothing before it."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class SftRows:
    """The rows, and by cause how many were left out."""

    rows: Sequence[SftRow]
    left_out: Mapping[str, int]


def export_rows(store: Path, where: str, out: Path) -> Path:
    """Write the rows of `store` that `where` means to `out`; `store` itself when it is a file of such rows.

    Raises:
        NoStore: there is no such store, or the expression is wrong.
        NoRows: the store cannot be read.
    """
    if store.is_file():
        return store
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [*CLI, "export", str(store), "--state", "finished", "--where", where, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().removeprefix("turngate export: ")
        raise NoStore(words) if done.returncode == EXPORT_USAGE else NoRows(words)
    return out


def read_rows(path: Path, max_row_tokens: int) -> SftRows:
    """Read exported rows.

    Raises:
        NoRows: it is no such file, or no row is left.
    """
    rows, left_out = [], Counter[str]()
    try:
        with path.open("rb") as lines:
            for line in lines:
                row = _row(orjson.loads(line))
                if len(row.ids) > max_row_tokens:
                    left_out["longer than max_row_tokens"] += 1
                elif row.learnt_tokens == 0:
                    left_out["nothing to learn"] += 1
                else:
                    rows.append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoRows(f"{path} holds no rows as `turngate export --what rows` writes them: {error!r}") from error
    if not rows:
        why = ", ".join(f"{count} {cause}" for cause, count in left_out.items()) or "no rollout is meant"
        raise NoRows(f"no rows to learn from ({why}); `turngate export --what rollouts` shows what a store holds")
    return SftRows(rows, dict(left_out))


def _row(record: Mapping[str, Any]) -> SftRow:
    ids, mask = record["ids"], record["mask"]
    if len(ids) != len(mask):
        raise ValueError(f"a row of {record['rollout']} has {len(ids)} ids and {len(mask)} places in its mask")
    labels = tuple(token if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True))
    return SftRow(record["rollout"], record["task"], tuple(ids), labels)
