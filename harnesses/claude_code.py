"""Claude Code (`@anthropic-ai/claude-code`), headless: its native binary for x86-64 Linux, one `claude -p` a prompt.

The npm package only picks a binary; the one named here is for glibc. Compaction, sub-agents and whatever reports home
are off unless asked for, and permissions are never asked: the sandbox is the fence.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngate.harnesses.base import Dialect, Endpoint, HarnessOptions, Output, Places, Source, Verdict, call
from turngate.proxy import wire
from turngate.tasks.steps import Say, Step, as_shell

SWITCHED_OFF = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS",
    "CLAUDE_CODE_DISABLE_TERMINAL_TITLE",
    "DISABLE_AUTOUPDATER",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
)

CUT = "max_output_tokens"
"""The error of a run whose answers were cut by the token limit four times in a row: the model's doing, not a fault."""


@dataclass(frozen=True, slots=True)
class ClaudeCode:
    """See `turngate.harnesses.base.Harness`."""

    name: str = "claude-code"
    package: str = "@anthropic-ai/claude-code-linux-x64"
    version: str = "2.1.332"
    source: Source = "npm"
    dialect: Dialect = "messages"
    quirks: tuple[str, ...] = (
        "tool arguments come back as an object with its keys in the order of the tool's schema",
        "its first system block changes with every request; the gateway keeps it out of the prompt",
        "an empty answer is dropped and asked for again with a note: a break; a second one comes back as other words",
        "an escape that stands as text in a command (`\\u2028`) comes back as the character: a break",
        "an answer cut by its limit is asked to go on; four in a row end the run, scored and marked `answer_cut`",
        "tool results come back in the order of completion; the gateway puts them in the order of the calls",
        "sub-agents send an id of their own in a header; they run beside the main conversation",
        "the first prompt holds the working directory, the date and the state of git",
    )
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def offers_tools(self, options: HarnessOptions) -> bool:
        """With its tools on."""
        return options.tools

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """`claude -p`, then `claude -p --continue` for each further prompt, in one shell."""
        binary = places.package / "node_modules" / self.package / "claude"
        words = [str(binary), "-p", "--dangerously-skip-permissions", "--output-format", "json"]
        if options.system_prompt is not None:
            words += ["--system-prompt", options.system_prompt]
        if not options.tools:
            words += ["--tools", ""]
        elif not options.subagents:
            words += ["--disallowedTools", "Task", "Agent"]
        calls = []
        for number in range(len(prompts)):
            line = shlex.join([*words, *(["--continue"] if number else []), *options.extra_args])
            limits = f"CLAUDE_CODE_MAX_CONTEXT_TOKENS={options.context_tokens} "
            limits += f"CLAUDE_CODE_MAX_OUTPUT_TOKENS={options.max_answer_tokens} "
            limits += "" if options.compaction else "DISABLE_COMPACT=1 "
            calls.append(f'printf %s "${{{number + 1}}}" | {limits}{line}')
        return ["sh", "-c", " && ".join(calls), "claude", *prompts]

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """Settings without hooks or marks of authorship, and the onboarding done."""
        return {
            ".claude/settings.json": json.dumps({"includeCoAuthoredBy": False, "autoUpdates": False}),
            ".claude.json": json.dumps({"hasCompletedOnboarding": True}),
        }

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """Where the model is; this client adds `/v1` itself."""
        return {
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": endpoint.api_key,
            "ANTHROPIC_MODEL": endpoint.model,
            "ANTHROPIC_SMALL_FAST_MODEL": endpoint.model,
            "IS_SANDBOX": "1",
            **dict.fromkeys(SWITCHED_OFF, "1"),
        }

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """Shell commands only: its file tools want absolute paths, and a file read before it is changed."""
        if isinstance(step, Say):
            return wire.SaidTurn(content=step.text)
        return call("Bash", command=as_shell(step), description="Work on the task")

    def verdict(self, output: Output) -> Verdict:
        """The result object of the last prompt; what it calls an error is a fault."""
        results = [found for line in output.stdout.splitlines() if (found := _result(line)) is not None]
        last = results[-1] if results else {}
        answer = str(last.get("result") or "")
        notes = {"steps": sum(int(one.get("num_turns") or 0) for one in results)}
        if last.get("api_error") == CUT:
            return Verdict("", None, {**notes, "answer_cut": 1})
        if output.exit_code != 0:
            return Verdict(answer, f"harness_exit_{output.exit_code}", notes)
        return Verdict(answer, "harness_error" if last.get("is_error") or not results else None, notes)


def _result(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("type") == "result" else None
