"""OpenCode (`opencode-ai`), headless: its native binary for x86-64 Linux, one `opencode run` a prompt in one session.

The npm package `opencode-ai` only picks a binary; the one named here runs on every x86-64. Titles and automatic
compaction are off unless asked for: the first costs turns that teach nothing, the second rewrites the history.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngate.harnesses.base import Dialect, Endpoint, HarnessOptions, Output, Places, Source, Verdict, call
from turngate.proxy import wire
from turngate.tasks.steps import Bash, Edit, Read, Say, Step, Write

PROVIDER = "turngate"
SWITCHED_OFF = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "CLAUDE_CODE", "FILEWATCHER")


@dataclass(frozen=True, slots=True)
class OpenCode:
    """See `turngate.harnesses.base.Harness`."""

    name: str = "opencode"
    package: str = "opencode-linux-x64-baseline"
    version: str = "1.18.33"
    source: Source = "npm"
    dialect: Dialect = "chat"
    quirks: tuple[str, ...] = (
        "tool arguments are parsed and written again by JavaScript; an answer without text comes back as an empty one",
        "an unknown tool, or arguments that are no JSON, come back as a call of `invalid`, id kept: a break",
        "the first system prompt holds the working directory and the date",
        "agents started by the `task` tool run in parallel and name their parent's session beside their own",
        "after a context-length error it asks again without end; the gateway's terminal answer keeps it from that",
        "errors of the model leave status 0; they are read from its events",
    )
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def offers_tools(self, options: HarnessOptions) -> bool:
        """With its tools on."""
        return options.tools

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """`opencode run`, then `opencode run --continue` for each further prompt, in one shell."""
        binary = places.package / "node_modules" / self.package / "bin" / "opencode"
        words = [str(binary), "run", "--format", "json", "-m", f"{PROVIDER}/{endpoint.model}"]
        title = [] if options.side_calls else ["--title", "task"]
        first, more = [*words, *title, *options.extra_args], [*words, "--continue", *options.extra_args]
        return _one_after_another(first, more, prompts)

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """opencode.json: the provider that points at the gateway, permissions, and what is switched off."""
        model = {
            "name": endpoint.model,
            "limit": {"context": options.context_tokens, "output": options.max_answer_tokens},
            "tool_call": options.tools,
        }
        agents: dict[str, Any] = {"title": {"disable": not options.side_calls}}
        if options.system_prompt is not None:
            agents["build"] = {"prompt": options.system_prompt}
        config: dict[str, Any] = {
            "$schema": "https://opencode.ai/config.json",
            "provider": {
                PROVIDER: {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": endpoint.base_url, "apiKey": endpoint.api_key},
                    "models": {endpoint.model: model},
                }
            },
            "model": f"{PROVIDER}/{endpoint.model}",
            "small_model": f"{PROVIDER}/{endpoint.model}",
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "compaction": {"auto": options.compaction, "prune": options.compaction},
            "agent": agents,
        }
        if not options.tools:
            config["tools"] = {"*": False}
        elif not options.subagents:
            config["tools"] = {"task": False}
        return {".config/opencode/opencode.json": json.dumps(config)}

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """Nothing is fetched."""
        return {f"OPENCODE_DISABLE_{name}": "1" for name in SWITCHED_OFF}

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """OpenCode's tools bash, read, write and edit; it takes paths relative to the workspace as well."""
        match step:
            case Say():
                return wire.SaidTurn(content=step.text)
            case Bash():
                return call("bash", command=step.command, description="Work on the task")
            case Read():
                return call("read", filePath=step.path)
            case Write():
                return call("write", filePath=step.path, content=step.content)
            case Edit():
                return call("edit", filePath=step.path, oldString=step.old, newString=step.new)

    def verdict(self, output: Output) -> Verdict:
        """The texts after the last tool call of the last step, from its events; an error event is a fault."""
        events = [event for line in output.stdout.splitlines() if (event := _event(line)) is not None]
        errors = [event for event in events if event.get("type") == "error"]
        notes = {"steps": sum(event.get("type") == "step_start" for event in events)}
        if output.exit_code != 0:
            return Verdict(_answer(events), f"harness_exit_{output.exit_code}", notes)
        return Verdict(_answer(events), "harness_error" if errors else None, notes)


def _one_after_another(first: Sequence[str], more: Sequence[str], prompts: Sequence[str]) -> list[str]:
    """One shell that runs `first` on the first prompt and `more` on each further one, until one fails.

    A prompt goes in by stdin: OpenCode puts quotation marks around arguments with spaces.
    """
    calls = []
    for number in range(len(prompts)):
        line = shlex.join(more if number else first)
        calls.append(f'printf %s "${{{number + 1}}}" | {line}')
    return ["sh", "-c", " && ".join(calls), "opencode", *prompts]


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _answer(events: Sequence[Mapping[str, Any]]) -> str:
    """The text parts of the last step that has any."""
    texts: list[str] = []
    for event in events:
        if event.get("type") == "step_start":
            texts = []
        elif event.get("type") == "text":
            texts.append(str((event.get("part") or {}).get("text", "")))
    return "\n".join(texts)
