"""How answers ended before: whether derender still has to be asked about an end that is known without it.

Derender's last call says nothing new about plain text that the tokenizer gave already, nor about tool calls whose
closing marker and whole arguments are there. That is believed once it was seen often enough, and then still looked at
now and then; it must never be believed again after derender said otherwise once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST = 8
"""So many ends must have been as expected, in a row from the start."""

EVERY = 8
"""After that derender is asked about one end in so many."""


@dataclass(slots=True)
class Ending:
    """One kind of end, over all answers of a gateway."""

    _alike: int = 0
    _unasked: int = 0
    _differed: bool = False

    def believed(self) -> bool:
        """Whether this end may do without derender; where not, `told` must be called with what derender said."""
        if self._differed or self._alike < FIRST or self._unasked >= EVERY - 1:
            return False
        self._unasked += 1
        return True

    def told(self, alike: bool) -> None:
        """Derender was asked: whether it said what was expected."""
        self._alike += 1
        self._unasked = 0
        self._differed = self._differed or not alike


@dataclass(frozen=True, slots=True)
class Endings:
    """`plain`: streams of plain text. `closed`: answers that end with their last tool call's closing marker."""

    plain: Ending = field(default_factory=Ending)
    closed: Ending = field(default_factory=Ending)
