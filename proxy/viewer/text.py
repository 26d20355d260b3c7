"""Text of single tokens, offline, from the run's `tokenizer.json`.

A character may be spread over several tokens: the last of them carries it, the earlier ones show their bytes. Nothing
here may turn text back into ids: the store's ids are what was sampled, and text is only for eyes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from turngate.proxy.viewer.reader import ViewerError

_BYTE_LEVEL_SHIFTED = [n for n in range(256) if not (33 <= n <= 126 or 161 <= n <= 172 or 174 <= n <= 255)]
BYTE_OF = {chr(n): n for n in range(256) if n not in _BYTE_LEVEL_SHIFTED} | {
    chr(256 + place): n for place, n in enumerate(_BYTE_LEVEL_SHIFTED)
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One token for eyes: `text` (its bytes in hex when `partial`), and whether it is a special token."""

    id: int
    text: str
    special: bool = False
    partial: bool = False
    unknown: bool = False


class TokenText:
    """Pieces of token ids; without a tokenizer every piece shows its id.

    Raises:
        ViewerError: the file is not a tokenizer.
    """

    def __init__(self, tokenizer_file: Path | None) -> None:
        self._tokenizer: Tokenizer | None = None
        self._special: frozenset[int] = frozenset()
        if tokenizer_file is None:
            return
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:
            raise ViewerError(f"{tokenizer_file} is not a tokenizer.json: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """One piece for each id, decoded in order."""
        if self._tokenizer is None:
            return [Piece(int(number), str(int(number)), unknown=True) for number in ids]
        stream = DecodeStream(skip_special_tokens=False)
        return [self._piece(stream, int(number)) for number in ids]

    def one(self, number: int) -> str:
        """The text of a token by itself, for lists of alternatives."""
        if self._tokenizer is None:
            return str(number)
        token = self._tokenizer.id_to_token(number)
        if token is None:
            return f"⟨{number}⟩"
        text = str(self._tokenizer.decode([number], skip_special_tokens=False))
        return f"⟨{self._hex(token)}⟩" if "\ufffd" in text else text

    def _piece(self, stream: DecodeStream, number: int) -> Piece:
        assert self._tokenizer is not None
        token = self._tokenizer.id_to_token(number)
        if token is None:
            return Piece(number, f"⟨{number}⟩", unknown=True)
        if number in self._special:
            stream.step(self._tokenizer, number)
            return Piece(number, token, special=True)
        text = stream.step(self._tokenizer, number)
        if text is None:
            return Piece(number, self._hex(token), partial=True)
        return Piece(number, text)

    @staticmethod
    def _hex(token: str) -> str:
        if token.startswith("<0x") and token.endswith(">"):
            return token[3:-1]
        return "".join(f"{BYTE_OF[char]:02X}" if char in BYTE_OF else char for char in token)
