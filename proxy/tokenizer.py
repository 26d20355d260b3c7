"""The run's tokenizer, kept once with the store so that recorded tokens can be shown as text without the model."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

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
        from tokenizers import Tokenizer

        Tokenizer.from_pretrained(source).save(str(target))
    except Exception as error:  # noqa: BLE001 - the tokenizers binding raises bare Exception
        log.warning("tokenizer_missing", extra={"source": source, "error": str(error)})
        return False
    return True


class Detokenizer:
    """The kept tokenizer's decoding, loaded when it is first asked for: few turns need it, and it is large."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._decode: Decode | None = None

    async def __call__(self) -> Decode | None:
        """`(ids, skip_special_tokens) -> text`; None when no tokenizer was kept."""
        if self._decode is None and self._path.exists():
            self._decode = await asyncio.to_thread(self._load)
        return self._decode

    def _load(self) -> Decode:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self._path))
        return lambda ids, skip: str(tokenizer.decode(list(ids), skip_special_tokens=skip))
