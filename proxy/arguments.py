"""The parser of every command line: no abbreviations, and an option that there is not names the one that was meant.

argparse takes `--lr 3` for the only option that begins so (`--lr-schedule`): a wrong run without a word. Needs nothing
but the standard library, so that every package may use it; it must never import the gateway.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

AT_MOST = 3
"""So many options are suggested."""


class Parser(argparse.ArgumentParser):
    """argparse's, with options in full only; its sub-parsers are of this kind too."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **settings})
        self._given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; what was given is kept for the error."""
        self._given = () if args is None else tuple(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Leave with status 2; for each option that there is not, the message names the nearest."""
        super().error(message + hints(self._given, list(_options(self))))


def hints(given: Sequence[str], known: Sequence[str]) -> str:
    """`; no --lr, did you mean …?` for each of the options in `given` that is not `known` but is near one."""
    words = given[: given.index("--")] if "--" in given else given
    found = ""
    for word in dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--")):
        if word not in known and (near := _near(word, known)):
            found += f"; no {word}, did you mean {' or '.join(near)}?"
    return found


def _near(wrong: str, known: Sequence[str]) -> list[str]:
    """Options that are spelt alike, that `wrong` begins, or whose words it has the first letters of (`--lr`)."""
    options = [option for option in known if option.startswith("--")]
    letters = wrong.strip("-")
    initials = [option for option in options if "".join(part[:1] for part in option.strip("-").split("-")) == letters]
    begun = [option for option in options if option.startswith(wrong)]
    alike = difflib.get_close_matches(wrong, options, n=AT_MOST, cutoff=0.7)
    return list(dict.fromkeys([*initials, *begun, *alike]))[:AT_MOST]


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every option of a parser and of those below it, which leave what they do not know to the one above."""
    for action in parser._actions:
        if action.help is not argparse.SUPPRESS:
            yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _options(below)
