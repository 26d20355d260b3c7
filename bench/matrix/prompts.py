"""Which conversation of a scenario a prompt belongs to, told from the prompt alone; each has answers and a label.

The fake engine answers by it, and afterwards it says the true label of each recorded turn. It must never ask the
gateway: what a turn is called there is what is to be checked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tests.fake_engine.script import Script, answer_text
from turngate.proxy.turns import Label

_BLOCK = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.S)
_TOOLS = "<tools>"


@dataclass(frozen=True)
class Prompt:
    """A decoded ChatML prompt that ends in an open assistant turn."""

    text: str

    @cached_property
    def _blocks(self) -> list[tuple[str, str]]:
        return _BLOCK.findall(self.text)[:-1]

    @cached_property
    def answers(self) -> int:
        """Assistant turns before the open one."""
        return sum(role == "assistant" for role, _ in self._blocks)

    @cached_property
    def head(self) -> str:
        """What stands before the first answer."""
        first = next((i for i, (role, _) in enumerate(self._blocks) if role == "assistant"), len(self._blocks))
        return "\n".join(text for _, text in self._blocks[:first])

    @cached_property
    def tail(self) -> str:
        """What stands after the last answer."""
        last = max((i for i, (role, _) in enumerate(self._blocks) if role == "assistant"), default=-1)
        return "\n".join(text for _, text in self._blocks[last + 1 :])

    @cached_property
    def said(self) -> str:
        """The answers in it."""
        return "\n".join(text for role, text in self._blocks if role == "assistant")

    @cached_property
    def tools(self) -> bool:
        """Whether it offers tools."""
        return any(role == "system" and _TOOLS in text for role, text in self._blocks)


@dataclass(frozen=True)
class Conversation:
    """What one part of an agent is told: `answers[n]` after n answers, the last one from there on.

    It owns the prompts with `head` before their first answer, `said` in their answers, `tail` after the last one, and
    tools if `tools`.
    """

    label: Label
    answers: Sequence[Any]
    head: str = ""
    said: str = ""
    tail: str = ""
    tools: bool | None = None

    def owns(self, prompt: Prompt) -> bool:
        """Whether the prompt is of this conversation."""
        texts = self.head in prompt.head and self.said in prompt.said and self.tail in prompt.tail
        return texts and self.tools in (None, prompt.tools)


@dataclass(frozen=True)
class Talk(Script):
    """A script of conversations; the first that owns a prompt answers it."""

    conversations: Sequence[Conversation] = ()

    @classmethod
    def of_conversations(cls, conversations: Sequence[Conversation]) -> Talk:
        """The script; `Script.answers` only says that there are answers."""
        return cls(answers={"": ["-"]}, conversations=conversations)

    def conversation(self, prompt: str) -> Conversation:
        """Whose prompt it is.

        Raises:
            LookupError: no conversation owns it.
        """
        parsed = Prompt(prompt)
        found = next((one for one in self.conversations if one.owns(parsed)), None)
        if found is None:
            raise LookupError(f"no conversation owns the prompt that ends in {prompt[-200:]!r}")
        return found

    def answer(self, prompt: str) -> str:
        """See `Script.answer`."""
        answers = self.conversation(prompt).answers
        return answer_text(answers[min(Prompt(prompt).answers, len(answers) - 1)])
