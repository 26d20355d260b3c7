"""Whether a part that died is started again, and when: bounded, with pauses that grow, and never where it is in vain.

Pure: times are passed in. A part counts as well once it has lived for `at_once_s`; one that dies before that, again
and again, ends the run, because starting it once more would only hide its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

USAGE = 2
"""Exit status of a part that was told something impossible: it would end in the same way again."""

IN_VAIN = 78
"""Exit status (EX_CONFIG) of a trainer that learns nothing as it was told to train."""


class RestartSettings(BaseModel):
    """What the launcher does about a part that dies while the run goes on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit: int = Field(16, ge=0, description="restarts of one part in a run; one more death ends it; 0: the first does")
    at_once: int = Field(3, ge=1, description="so many deaths of a part in a row, each at once, end the run")
    at_once_s: float = Field(
        30.0, ge=0, description="a part that dies before it is ready, or within this of it, died at once"
    )
    pause_s: float = Field(1.0, ge=0, description="before a restart; doubled with each death at once before it")
    longest_pause_s: float = Field(60.0, ge=0, description="no pause is longer")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows from a death: a restart after `pause_s`, or, where that is None, the end of the run for `why`."""

    pause_s: float | None
    why: str = ""


class Lives:
    """The deaths of one part in one run."""

    def __init__(self, settings: RestartSettings) -> None:
        self._settings = settings
        self.restarts = 0
        self._at_once = 0

    def died(self, code: int, well_s: float | None) -> Verdict:
        """It ended with `code` after `well_s` seconds of being ready; None: it never was."""
        s = self._settings
        if s.limit == 0:
            return Verdict(None)
        if code == USAGE:
            return Verdict(None, "it was started wrongly and would end so again")
        if code == IN_VAIN:
            return Verdict(None, "it learns nothing with these settings")
        self._at_once = self._at_once + 1 if well_s is None or well_s < s.at_once_s else 0
        if self._at_once >= s.at_once:
            return Verdict(None, f"it died at once {self._at_once} times in a row")
        if self.restarts >= s.limit:
            return Verdict(None, f"it was restarted {self.restarts} times already (restarts.limit)")
        self.restarts += 1
        return Verdict(min(s.pause_s * 2 ** max(0, self._at_once - 1), s.longest_pause_s))
