#!/usr/bin/env python3
"""A model whose tokenizer has the marks of tool calls as ordinary text, for bases never trained to write the marks.

    python bench/gpu/plain_marks.py MODEL_FOLDER OUT_FOLDER

OUT gets links to MODEL's files, and its tokenizer without the added tokens that are not special, such as Qwen's
`<tool_call>`: to the model it is then `<`, `tool`, `_call`, `>`. Chat template and tool parser stay as they are. See
docs/warm-start.md for the models that need this. Prints the tokens as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    tokenizer = json.loads((options.model / TOKENIZER).read_text())
    config = json.loads((options.model / CONFIG).read_text())
    marks = [token["content"] for token in tokenizer["added_tokens"] if not token["special"]]
    if not marks:
        print(f"plain_marks.py: {options.model} has no added token that is not special", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True)
    for path in options.model.iterdir():
        if path.name not in (TOKENIZER, CONFIG):
            (options.out / path.name).symlink_to(path.absolute())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["special"]]
    (options.out / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False))
    (options.out / CONFIG).write_text(json.dumps(_without(config, marks), indent=2, ensure_ascii=False))
    print(json.dumps(marks))
    return 0


def _without(config: dict[str, Any], marks: list[str]) -> dict[str, Any]:
    known: dict[str, Any] = config.get("added_tokens_decoder", {})
    kept = {key: token for key, token in known.items() if token.get("content") not in marks}
    return {**config, "added_tokens_decoder": kept} if known else config


if __name__ == "__main__":
    sys.exit(main())
