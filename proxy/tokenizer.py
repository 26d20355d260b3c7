"""The run's tokenizer, kept once with the store so that recorded tokens can be shown as text without the model."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from turngate.proxy.engine.continuation import Decode

log = logging.getLogger("turngate.tokenizer")


def keep_tokenizer(target: Path, source: str | None) -> bool:
    """Put `tokenizer.json` at `target` from a model folder or hub id; returns whether it is there now.

    A tokenizer that cannot be had is logged, not fatal: tokens are then shown as ids.
    """
    if target.exists():
        return True
    if source is None:
        return False
    local = Path(source) / "tokenizer.json"
    if local.is_file():
        shutil.copyfile(local, target)
        return True
    if "/" not in source or Path(source).is_absolute():
        log.warning("tokenizer_missing", extra={"source": source, "error": "no such folder, and not a hub id"})
        return False
    try:
        Tokenizer.from_pretrained(source).save(str(target))
    except Exception as error:  # noqa: BLE001 - the tokenizers binding raises bare Exception
        log.warning("tokenizer_missing", extra={"source": source, "error": str(error)})
        return False
    return True


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The kept tokenizer; None, and a word in the log, where it cannot be read."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the tokenizers binding raises bare Exception
        log.warning("tokenizer_unreadable", extra={"path": str(path), "error": str(error)})
        return None


def plain_decode(tokenizer: Tokenizer | None) -> Decode | None:
    """`(ids, skip_special_tokens) -> text`; None without a tokenizer."""
    if tokenizer is None:
        return None
    return lambda ids, skip: str(tokenizer.decode(list(ids), skip_special_tokens=skip))
