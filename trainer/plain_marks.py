"""A model whose tokenizer has the marks of tool calls as ordinary text, for bases never trained to write the marks.

Qwen2.5-Coder-0.5B's `<tool_call>` is one token with the same row of the output head as thousands of others, so no
adapter of the layers can teach it (`untrained_rows.py`); as `<`, `tool`, `_call`, `>` the base knows it. Chat template
and tool parser stay as they are. It must never change a weight.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turngate.proxy.arguments import Parser
from turngate.trainer.errors import TrainerError

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"


class MarksError(TrainerError):
    """The folder has no tokenizer of this kind, or none of its marks would change."""


def write_plain(model: Path, out: Path) -> list[str]:
    """Make `out`: links to the files of `model`, and its tokenizer without the added tokens that are not special.

    Returns:
        Those tokens, which are ordinary text from then on.

    Raises:
        MarksError: there is no such tokenizer, it has no such tokens, or `out` is there already.
    """
    try:
        tokenizer = json.loads((model / TOKENIZER).read_text(encoding="utf-8"))
        config = json.loads((model / CONFIG).read_text(encoding="utf-8"))
        marks = [token["content"] for token in tokenizer["added_tokens"] if not token["special"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MarksError(f"{model} holds no {TOKENIZER} and {CONFIG} of the tokenizers library: {error}") from error
    if not marks:
        raise MarksError(f"{model}: its tokenizer has no added token that is not special")
    try:
        out.mkdir(parents=True)
    except FileExistsError as error:
        raise MarksError(f"{out} is there already; name a new folder") from error
    try:
        for path in model.iterdir():
            if path.name not in (TOKENIZER, CONFIG):
                (out / path.name).symlink_to(path.absolute())
        tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["special"]]
        (out / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
        text = json.dumps(_without(config, marks), indent=2, ensure_ascii=False)
        (out / CONFIG).write_text(text, encoding="utf-8")
    except OSError:
        shutil.rmtree(out, ignore_errors=True)
        raise
    return marks


def _without(config: dict[str, Any], marks: Sequence[str]) -> dict[str, Any]:
    known: dict[str, Any] = config.get("added_tokens_decoder", {})
    kept = {key: token for key, token in known.items() if token.get("content") not in marks}
    return {**config, "added_tokens_decoder": kept} if known else config


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m turngate.trainer.plain_marks MODEL OUT`: make OUT and print the tokens as JSON."""
    parser = Parser(
        prog="python -m turngate.trainer.plain_marks",
        description="Make OUT: MODEL with its tokenizer's marks (added tokens that are not special, such as Qwen's "
        "<tool_call>) as ordinary text; links to all other files. Prints the marks as JSON.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("out", type=Path, help="the folder to make")
    options = parser.parse_args(argv)
    try:
        print(json.dumps(write_plain(options.model, options.out)))
    except (MarksError, OSError) as error:
        print(f"turngate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
