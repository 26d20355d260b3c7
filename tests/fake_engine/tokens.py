"""A model's real tokenizer and chat template, without torch or transformers.

Rendering follows vLLM: content parts become text, tool-call arguments become objects before the template sees them.
"""

from __future__ import annotations

import json
import pathlib
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

_REMEMBERED_TEXTS = 8192
_TEMPLATES = pathlib.Path(__file__).parent / "templates"


class Tokens:
    """The tokenizer and template of `model_dir`; `template` is `qwen` (its own), `drop-reasoning`, or a file."""

    def __init__(self, model_dir: str | pathlib.Path, template: str = "qwen") -> None:
        folder = pathlib.Path(model_dir)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        eos = config["eos_token"]
        self.eos_text: str = eos["content"] if isinstance(eos, dict) else eos
        eos_id = self.tokenizer.token_to_id(self.eos_text)
        if eos_id is None:
            raise ValueError(f"{folder}: the eos token {self.eos_text!r} is not in tokenizer.json")
        self.eos_id: int = eos_id
        self._after_eos = re.compile(f"(?<={re.escape(self.eos_text)})")
        self._encoded = lru_cache(_REMEMBERED_TEXTS)(self._encode)
        self.vocab_tokens = self.tokenizer.get_vocab_size()
        self._template = _environment().from_string(_template_text(folder, config, template))
        self._special = {name: value for name, value in config.items() if name in ("bos_token", "eos_token")}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens in it become special, none are added.

        Cut after each end-of-turn token, across which no token reaches, so that only new messages cost anything.
        """
        ids = array("i")
        for part in self._after_eos.split(text):
            ids.extend(self._encoded(part))
        return ids.tolist()

    def _encode(self, text: str) -> array[int]:
        return array("i", self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; an incomplete character at the end is U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, **kwargs: Any) -> list[int]:
        """Prompt ids of a chat request. Raises jinja2.TemplateError where the template refuses it."""
        text = self._template.render(
            messages=[_message(message) for message in messages],
            tools=list(tools) if tools else None,
            **{"add_generation_prompt": True, **self._special, **kwargs},
        )
        return self.encode(text)


def _template_text(folder: pathlib.Path, config: dict[str, Any], template: str) -> str:
    if template == "drop-reasoning":
        return (_TEMPLATES / "drop_reasoning.jinja").read_text(encoding="utf-8")
    if template != "qwen":
        return pathlib.Path(template).read_text(encoding="utf-8")
    own = folder / "chat_template.jinja"
    return own.read_text(encoding="utf-8") if own.exists() else str(config["chat_template"])


def _environment() -> jinja2.Environment:
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    return env


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    out["content"] = content or ""
    if message.get("tool_calls"):
        out["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return out


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = json.loads(arguments) if arguments.strip() else {}
    return {**call, "function": function}
