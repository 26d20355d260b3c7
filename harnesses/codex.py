"""OpenAI Codex (`@openai/codex`), headless: its native binary for x86-64 Linux, one `codex exec` a prompt, one session.

The npm package only picks a binary; the one pinned here is the same package's build for one platform, so no node runs.
Whatever fetches, reports, or changes the prompt from day to day is off; the sandbox is ours, so its own is too.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngate.harnesses.base import Dialect, Endpoint, HarnessOptions, Output, Places, Source, Verdict, call
from turngate.proxy import wire
from turngate.tasks.steps import Say, Step, as_shell

PROVIDER = "turngate"
KEY = "TURNGATE_SESSION_KEY"
SYSTEM = ".codex/system.md"
BINARY = "vendor/x86_64-unknown-linux-musl/bin/codex"
NEVER_TOKENS = 1_000_000_000
"""A context window that is never full: Codex compacts near the end of the one it knows, whatever it is told."""

OFF = ("apps", "goals", "hooks", "image_generation", "plugins", "shell_snapshot", "tool_suggest", "view_image")
CUT = "max_output_tokens"
"""In the error that a turn cut by its token limit is."""


@dataclass(frozen=True, slots=True)
class Codex:
    """See `turngate.harnesses.base.Harness`."""

    name: str = "codex"
    package: str = "@openai/codex"
    version: str = "0.171.0-linux-x64"
    source: Source = "npm"
    dialect: Dialect = "responses"
    quirks: tuple[str, ...] = (
        "history comes back verbatim, broken tool arguments, reasoning and its token too",
        "a turn cut by its token limit ends the run as an error; it is scored and marked `answer_cut`",
        "the first prompt holds the working directory and the date",
        "its tools for agents of its own stand in a namespace; those agents name their parent in a header",
        "it names a compaction in a header; what follows it is a break",
        "results of parallel calls come back in the order of the calls, with times and random ids in them",
    )
    unsupported: Mapping[str, str] = field(
        default_factory=lambda: {
            "max_answer_tokens": "Codex asks for no limit; set run.sampling.max_tokens instead",
            "side_calls": "Codex makes none; leave it out",
        }
    )

    def offers_tools(self, options: HarnessOptions) -> bool:
        """With its tools on."""
        return options.tools

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """`codex exec`, then `codex exec resume --last` for each further prompt, in one shell."""
        binary = places.package / "node_modules" / self.package / BINARY
        words = ["--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check"]
        if options.system_prompt is not None:
            words += ["-c", f"model_instructions_file={json.dumps(str(places.home / SYSTEM))}"]
        words += options.extra_args
        first = shlex.join([str(binary), "exec", *words])
        more = shlex.join([str(binary), "exec", "resume", "--last", *words])
        calls = [f'{more if i else first} -- "${{{i + 1}}}" </dev/null' for i in range(len(prompts))]
        return ["sh", "-c", " && ".join(calls), "codex", *prompts]

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """config.toml: the provider that points at the gateway, the context window, and what is switched off."""
        window = options.context_tokens if options.compaction else NEVER_TOKENS
        features = dict.fromkeys(OFF, False) | {"shell_tool": options.tools, "unified_exec": options.tools}
        sections: dict[str, dict[str, Any]] = {
            "": {
                "model": endpoint.model,
                "model_provider": PROVIDER,
                "model_context_window": window,
                "model_auto_compact_token_limit": window * 8 // 10,
                "web_search": "disabled",
                "check_for_update_on_startup": False,
                "include_permissions_instructions": False,
            },
            f"model_providers.{PROVIDER}": {
                "name": PROVIDER,
                "base_url": endpoint.base_url,
                "env_key": KEY,
                "wire_api": "responses",
                "stream_max_retries": 0,
                "supports_websockets": False,
            },
            "agents": {"enabled": options.tools and options.subagents},
            "analytics": {"enabled": False},
            "features": features,
            "skills": {"include_instructions": False},
            "skills.bundled": {"enabled": False},
            "tools.experimental_request_user_input": {"enabled": False},
        }
        files = {".codex/config.toml": "\n".join(_toml(sections))}
        return files if options.system_prompt is None else {**files, SYSTEM: options.system_prompt}

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """The session's key."""
        return {KEY: endpoint.api_key}

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """Shell commands only: with an unknown model it has no other tool for files."""
        if isinstance(step, Say):
            return wire.SaidTurn(content=step.text)
        return call("exec_command", cmd=as_shell(step))

    def verdict(self, output: Output) -> Verdict:
        """The last message, from its events; a turn that failed is a fault unless the token limit cut it."""
        events = [event for line in output.stdout.splitlines() if (event := _event(line)) is not None]
        items = [event.get("item") or {} for event in events if event.get("type") == "item.completed"]
        said = [str(item.get("text", "")) for item in items if item.get("type") == "agent_message"]
        errors = [str((event.get("error") or {}).get("message")) for event in events if event["type"] == "turn.failed"]
        answer = said[-1] if said else ""
        if errors and CUT in errors[-1]:
            return Verdict(answer, None, {"answer_cut": 1})
        if output.exit_code != 0:
            return Verdict(answer, f"harness_exit_{output.exit_code}")
        return Verdict(answer, "harness_error" if errors else None)


def _toml(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a TOML file; JSON's strings, numbers and booleans are TOML's."""
    for name, values in sections.items():
        if name:
            yield f"[{name}]"
        for key, value in values.items():
            yield f"{key} = {json.dumps(value)}"


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "type" in found else None
