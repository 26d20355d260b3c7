"""Agents whose own limits of silence are lowered, and which do not ask again when one has passed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turngate.harnesses.base import Endpoint, Harness, HarnessOptions, Places
from turngate.harnesses.gemini_cli import GeminiCli
from turngate.harnesses.opencode import PROVIDER
from turngate.harnesses.openhands import SETTINGS

GEMINI_TIMEOUT_FLAG = 45773134
"""Number of gemini-cli's switch for its longest wait for a first byte."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Impatience:
    """What lowers an agent's limits: a change of one of its JSON files, variables, arguments."""

    file: str = ""
    change: Callable[[Json], None] = lambda told: None
    env: Mapping[str, str] | None = None
    args: tuple[str, ...] = ()


class Impatient:
    """A harness with an impatience; everything else is as it was."""

    def __init__(self, inner: Harness, impatience: Impatience) -> None:
        self._inner = inner
        self._impatience = impatience

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """Its files, one of them changed or new."""
        found = self._inner.files(endpoint, options)
        if self._impatience.file:
            told = json.loads(found.get(self._impatience.file, "{}"))
            self._impatience.change(told)
            found[self._impatience.file] = json.dumps(told)
        return found

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """Its variables and more."""
        more = {key: value.format(home=places.home) for key, value in (self._impatience.env or {}).items()}
        return {**self._inner.env(places, endpoint), **more}


def impatience(agent: str, idle_s: int) -> Impatience:
    """How `agent` is made to wait for at most `idle_s` of silence, before the first byte and within an answer.

    claude-code takes no less than ten seconds. gemini-cli's limit is that of the first byte.
    """
    idle_ms = idle_s * 1000

    def opencode(told: Json) -> None:
        told["provider"][PROVIDER]["options"] |= {"headerTimeout": idle_ms, "chunkTimeout": idle_ms}

    def mini(told: Json) -> None:
        told["model"]["model_kwargs"] |= {"timeout": idle_s, "max_retries": 0}

    once = {"provider": {"maxRetries": 0}}
    all_of_them = {
        "pi": Impatience(
            ".pi/agent/settings.json",
            lambda told: told.update(httpIdleTimeoutMs=idle_ms, retry={"enabled": False, **once}),
        ),
        "opencode": Impatience(".config/opencode/opencode.json", opencode),
        "mini-swe-agent": Impatience(
            ".config/mini-swe-agent/turngate.yaml", mini, {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
        ),
        "openhands": Impatience(SETTINGS, lambda told: told["llm"].update(timeout=idle_s, num_retries=0)),
        "codex": Impatience(args=("-c", f"model_providers.turngate.stream_idle_timeout_ms={idle_ms}")),
        "claude-code": Impatience(
            env={
                "API_TIMEOUT_MS": str(idle_ms),
                "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": str(idle_ms),
                "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": str(idle_ms),
                "CLAUDE_ENABLE_BYTE_WATCHDOG": "1",
                "CLAUDE_CODE_MAX_RETRIES": "0",
            }
        ),
        GeminiCli().name: Impatience(
            ".gemini/flags.json",
            lambda told: told.update(flags=[{"flagId": GEMINI_TIMEOUT_FLAG, "intValue": str(idle_s)}]),
            {"GEMINI_EXP": "{home}/.gemini/flags.json"},
        ),
    }
    return all_of_them[agent]
