"""Gemini CLI (`@google/gemini-cli`), headless: one `gemini -p` a prompt, the further ones resume the same session.

It speaks Gemini's streamGenerateContent only. Whatever asks the model beside the work (next-speaker checks, loop
detection, topics) is off, because it costs turns that teach nothing.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turngate.harnesses.base import Dialect, Endpoint, HarnessOptions, Output, Places, Source, Verdict, call
from turngate.proxy import wire
from turngate.tasks.steps import Read, Say, Step, Write, as_shell

SYSTEM_FILE = ".gemini/system-prompt.md"
EMPTY_NOTICE = "The model returned an empty response"
"""How it ends a run, with status 0, after four empty answers: the model's doing, not a fault."""


@dataclass(frozen=True, slots=True)
class GeminiCli:
    """See `turngate.harnesses.base.Harness`."""

    name: str = "gemini-cli"
    package: str = "@google/gemini-cli"
    version: str = "0.61.0"
    source: Source = "npm"
    dialect: Dialect = "gemini"
    quirks: tuple[str, ...] = (
        "tool arguments are parsed and written again by JavaScript, key order kept; thoughts are dropped",
        "calls come back with the tool's name put before their id; the gateway names them by what they say",
        "arguments that are no JSON object reach it as an object with the text under `raw`; the turn stays as sampled",
        "an empty answer is dropped and asked for again, up to three times, with a note in the last user message",
        "the first user message holds the date, the working directory and its files",
        "after an error of the model it ends with a status other than 0",
    )
    unsupported: Mapping[str, str] = field(
        default_factory=lambda: {"side_calls": "the calls that Gemini CLI makes beside its work are off; leave it out"}
    )

    def offers_tools(self, options: HarnessOptions) -> bool:
        """With its tools on."""
        return options.tools

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """`gemini -p`, then `gemini --resume latest -p` for each further prompt, in one shell."""
        cli = places.package / "node_modules" / self.package / "bundle" / "gemini.js"
        words = [str(places.node), str(cli), "-m", endpoint.model, "--approval-mode", "yolo", "-o", "stream-json"]
        words += [*options.extra_args]
        export = f"export GEMINI_SYSTEM_MD={shlex.quote(str(places.home / SYSTEM_FILE))}; "
        calls = [
            f'{shlex.join([*words, *(["--resume", "latest"] if number else [])])} "--prompt=${{{number + 1}}}"'
            for number in range(len(prompts))
        ]
        system = export if options.system_prompt is not None else ""
        return ["sh", "-c", system + " && ".join(calls), "gemini", *prompts]

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """settings.json: the key as authentication, and what is switched off; the system prompt, where there is one."""
        limits = {"generateContentConfig": {"maxOutputTokens": options.max_answer_tokens}}
        settings: dict[str, Any] = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "general": {
                "enableAutoUpdate": False,
                "enableAutoUpdateNotification": False,
                "topicUpdateNarration": False,
                "plan": {"enabled": False},
            },
            "model": {
                "name": endpoint.model,
                "skipNextSpeakerCheck": True,
                "disableLoopDetection": True,
                "compressionThreshold": 0.7 if options.compaction else 1e9,
            },
            "modelConfigs": {"customOverrides": [{"match": {"model": endpoint.model}, "modelConfig": limits}]},
            "privacy": {"usageStatisticsEnabled": False},
            "ide": {"enabled": False},
            "skills": {"enabled": False},
            "hooksConfig": {"enabled": False},
            "experimental": {"enableAgents": options.subagents and options.tools},
            "tools": {"useRipgrep": False, "shell": {"enableInteractiveShell": False}},
        }
        if not options.tools:
            settings["tools"]["core"] = []
        files = {".gemini/settings.json": json.dumps(settings)}
        if options.system_prompt is not None:
            files[SYSTEM_FILE] = options.system_prompt
        return files

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """Where its model is (its SDK adds the version of the API), and no browser, no updates, no telemetry."""
        return {
            "GEMINI_API_KEY": endpoint.api_key,
            "GOOGLE_GEMINI_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GEMINI_TELEMETRY_ENABLED": "false",
            "GEMINI_CLI_NO_RELAUNCH": "true",
            "NO_BROWSER": "true",
        }

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """Gemini CLI's tools for the shell, for reading and for writing; edits by the shell."""
        match step:
            case Say():
                return wire.SaidTurn(content=step.text)
            case Read():
                return call("read_file", file_path=step.path)
            case Write():
                return call("write_file", file_path=step.path, content=step.content)
            case _:
                return call("run_shell_command", command=as_shell(step), description="Work on the task")

    def verdict(self, output: Output) -> Verdict:
        """The assistant's text after the last tool result, from its events; an error result is a fault."""
        events = [event for line in output.stdout.splitlines() if (event := _event(line)) is not None]
        errors = [event for event in events if event.get("type") == "result" and event.get("status") != "success"]
        notes = {"tool_calls": sum(event.get("type") == "tool_use" for event in events)}
        if any(str(event.get("message")).startswith(EMPTY_NOTICE) for event in events if event.get("type") == "error"):
            return Verdict(_answer(events), None, {**notes, "answer_empty": 1})
        if output.exit_code != 0:
            return Verdict(_answer(events), f"harness_exit_{output.exit_code}", notes)
        return Verdict(_answer(events), "harness_error" if errors else None, notes)


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _answer(events: Sequence[Mapping[str, Any]]) -> str:
    """The assistant's text since the last tool result or user message that any follows."""
    texts: list[str] = []
    fresh = True
    for event in events:
        if event.get("type") == "message" and event.get("role") == "assistant":
            texts = [] if fresh else texts
            texts.append(str(event.get("content") or ""))
            fresh = False
        elif event.get("type") in ("tool_use", "tool_result", "message"):
            fresh = True
    return "".join(texts)
