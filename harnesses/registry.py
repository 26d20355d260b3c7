"""Every harness there is, by name.

One list, so that settings, help texts and installation agree on what can be run.
"""

from __future__ import annotations

from turngate.harnesses.base import Harness
from turngate.harnesses.chat import Chat
from turngate.harnesses.claude_code import ClaudeCode
from turngate.harnesses.codex import Codex
from turngate.harnesses.errors import UnknownHarness
from turngate.harnesses.gemini_cli import GeminiCli
from turngate.harnesses.mini_swe_agent import MiniSweAgent
from turngate.harnesses.opencode import OpenCode
from turngate.harnesses.openhands import OpenHands
from turngate.harnesses.pi import Pi


def list_harnesses() -> tuple[Harness, ...]:
    """All harnesses, in the order in which they are documented."""
    return (Pi(), OpenCode(), MiniSweAgent(), OpenHands(), ClaudeCode(), Codex(), GeminiCli(), Chat())


def get_harness(name: str) -> Harness:
    """The harness called `name`.

    Raises:
        UnknownHarness: there is none; the message lists those there are.
    """
    known = {harness.name: harness for harness in list_harnesses()}
    if name not in known:
        raise UnknownHarness(f"harness {name!r} is not known; choose one of: {', '.join(sorted(known))}")
    return known[name]
