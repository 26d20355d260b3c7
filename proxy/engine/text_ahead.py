"""Plain text of an answer, decoded here as it is sampled, for as long as derender would say just the same.

A derender call costs both sides a request and replays all output, so most of the text of a stream comes from the kept
tokenizer. It is only trusted after derender gave the very same text for the tokens before, and never past anything
that a parser could take for the beginning of a tool call or of thinking.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from turngate.proxy.engine.wire import Delta

SPELLED = ("<tool_call", "<function=", "<think", "</think")
"""Beginnings of what the parsers that the probe knows take for markers, also when spelled in ordinary tokens."""

_SPELLED = re.compile("|".join(map(re.escape, SPELLED)))
_CALL = re.compile("|".join(map(re.escape, SPELLED[:2])))
_LONGEST = max(map(len, SPELLED))
_PARTS = ("content", "reasoning", "reasoning_content")


class TextAhead:
    """The text of one answer.

    Args:
        tokenizer: the run's.
        markers: ids of all added tokens: at any of them derender must be asked.
        before: the last ids of the prompt, int32[N]: some tokenizers write a token by what stands before it.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Collection[int], before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._markers = markers
        self._stream = DecodeStream(ids=list(before), skip_special_tokens=False)
        self._part: str | None = None
        self._text = ""
        self._given = ""
        self._marked = False
        self._ever_marked = False
        self._wrong = False
        self._whole_characters = False
        self._marks: list[int] = []
        self._last = -1

    def take(self, ids: Sequence[int]) -> None:
        """Add sampled ids, without the stop token."""
        if self._wrong:
            return
        marks = [one for one in ids if one in self._markers]
        self._marks += marks
        self._last = ids[-1]
        self._marked = self._marked or bool(marks)
        self._ever_marked = self._ever_marked or self._marked
        try:
            text = self._stream.step(self._tokenizer, list(ids))
            self._whole_characters = text is not None
            self._text += text or ""
        except Exception:  # noqa: BLE001 - the tokenizers binding raises bare Exception
            self._wrong = True

    @property
    def plain(self) -> bool:
        """Whether nothing at all that was taken could begin a marker."""
        if not self._wrong and not self._ever_marked and "<" in self._text:
            self._ever_marked = bool(_SPELLED.search(self._text) or _begins(self._text))
        return not self._wrong and not self._ever_marked

    @property
    def known(self) -> bool:
        """Whether all that was taken is plain text that is known to its last character, and derender agreed before."""
        return bool(self._text) and self.in_step and self._whole_characters and self.plain

    @property
    def calling(self) -> bool:
        """Whether a tool call began since derender was asked last, in what followed plain text."""
        return self._part is not None and self._marked and _CALL.search(self._text) is not None

    def closed(self, calls: int) -> bool:
        """Whether the last token is a marker that was sampled once for each of so many tool calls."""
        return not self._wrong and bool(self._marks) and self._marks.count(self._last) == calls

    @property
    def in_step(self) -> bool:
        """Whether derender need not be asked about the tokens since it was asked last."""
        return self._part is not None and not self._marked and not self._wrong

    def delta(self) -> Delta:
        """The text that can be given away now; after it `in_step` may be False."""
        if self._part is None or self._marked or self._wrong:
            return {}
        begun = len(self._given)
        found = _SPELLED.search(self._text, max(begun - _LONGEST, 0))
        self._marked = found is not None
        self._ever_marked = self._ever_marked or self._marked
        text = self._text[begun : found.start() if found else len(self._text) - _begins(self._text)]
        self._given += text
        return {self._part: text} if text else {}

    def rest(self, derendered: Delta) -> tuple[Delta, bool]:
        """Of derender's delta for the tokens since it was asked last, what was not given away; and whether all was.

        False where derender's text does not begin with what was given: then nothing may be given ahead any more.
        """
        part, given, text = self._part, self._given, self._text
        spoken = [key for key in derendered if key != "role"]
        plain = len(spoken) == 1 and spoken[0] in _PARTS and derendered[spoken[0]] == text
        self._part = spoken[0] if plain else None
        self._ever_marked = not self.plain
        self._text = self._given = ""
        self._marked = False
        if not given or part is None:
            return derendered, True
        said = str(derendered.get(part, ""))
        self._wrong = self._wrong or not said.startswith(given)
        rest = {**derendered, part: said[len(given) :]}
        return {key: value for key, value in rest.items() if value}, not self._wrong


def _begins(text: str) -> int:
    """Length of the longest end of `text` that is a beginning of one of `SPELLED`."""
    at = text.find("<", max(len(text) - _LONGEST, 0))
    while at >= 0:
        if any(one.startswith(text[at:]) for one in SPELLED):
            return len(text) - at
        at = text.find("<", at + 1)
    return 0
