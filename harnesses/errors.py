"""The one exception tree of this package.

Every message says what was wrong, where, and what to do. A `Fault` costs one rollout; anything else ends the run.
"""

from __future__ import annotations


class HarnessesError(RuntimeError):
    """Base of everything raised on purpose in `turngate.harnesses`."""


class UnknownHarness(HarnessesError):
    """No harness of that name."""


class SettingsWrong(HarnessesError):
    """Settings that cannot work together; the message names the key and the fix."""


class InstallError(HarnessesError):
    """A harness could not be installed into the cache."""


class SandboxUnavailable(HarnessesError):
    """This machine cannot make the sandbox that the settings ask for."""


class LimitsUnenforced(HarnessesError):
    """`limits.strict` is set and something cannot be held here."""


class Fault(HarnessesError):
    """One rollout cannot be scored. `cause` is a word of `rollout.CAUSES`; the text has the detail."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause
        self.detail = detail


class OutBusy(HarnessesError):
    """Another runner works in the same `out` folder."""
