"""What the fake policy says: scripted answers by conversation turn, or endless filler for load.

The engine sees ids only, so a turn is counted by the assistant turns in the decoded prompt, and a conversation is
told from others by a marker in it.
"""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ASSISTANT = "<|im_start|>assistant"
_FILLER = (
    "The tests pass now, so the next step is to look at the other module and see which of its functions are used. "
)


@dataclass(frozen=True)
class Script:
    """`answers[marker][turn]` is raw model text, without end-of-turn token; marker "" is for everyone else.

    After its last answer a conversation gets that answer again. Without any answers the text is one of `fillers`,
    or filler of `filler_chars` characters.
    """

    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    filler_chars: int = 400
    fillers: Sequence[str] = ()

    @classmethod
    def of(cls, value: Any) -> Script:
        """From a list of answers, or an object from marker to such lists; see `answer_text` for one answer.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(value, list):
            value = {"": value}
        if not isinstance(value, dict) or not all(isinstance(one, list) and one for one in value.values()):
            raise ValueError("a script is a list of answers, or an object from marker to lists of answers, none empty")
        return cls({marker: [answer_text(one) for one in answers] for marker, answers in value.items()})

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Script:
        """From a JSON file."""
        return cls.of(json.loads(pathlib.Path(path).read_text(encoding="utf-8")))

    def answer(self, prompt: str) -> str:
        """The text to say after a decoded prompt."""
        chosen = next((marker for marker in self.answers if marker and marker in prompt), "")
        answers = self.answers.get(chosen)
        if not answers:
            if self.fillers:
                return self.fillers[zlib.crc32(prompt.encode()) % len(self.fillers)]
            repeats = self.filler_chars // len(_FILLER) + 1
            return (_FILLER * repeats)[: self.filler_chars]
        turn = max(prompt.count(_ASSISTANT) - 1, 0)
        return answers[min(turn, len(answers) - 1)]

    def filler(self, prompt: Sequence[int]) -> str:
        """What to say without answers: chosen by the end of the prompt, which is cheap however long it is."""
        return self.answer(repr(prompt[-64:]))


def answer_text(answer: Any) -> str:
    """Raw model text of one answer: a string as it is, or `{"reasoning", "content", "tool_calls"}`.

    A tool call is `{"name", "arguments"}` with the arguments' JSON as text, kept as written, or as an object.
    """
    if isinstance(answer, str):
        return answer
    text = f"<think>{answer['reasoning']}</think>" if answer.get("reasoning") else ""
    text += answer.get("content") or ""
    for call in answer.get("tool_calls", ()):
        arguments = call["arguments"]
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
        text += f'\n<tool_call>\n{{"name": "{call["name"]}", "arguments": {raw}}}\n</tool_call>'
    return text.removeprefix("\n")
