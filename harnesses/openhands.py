"""OpenHands (the CLI `openhands`), headless: its own agent with its own prompts, answers never streamed.

It runs on Python 3.12 only. Its events come as lines of JSON; the endpoint and what is switched off stand in its
settings file. Its condenser (compaction) is off unless asked for: it rewrites the history.
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

SETTINGS = ".openhands/agent_settings.json"
NO_SKILLS = ".openhands/cache/skills/public-skills"
"""Where it would clone skills from the net to; a file in that place keeps it from trying."""

TOO_MANY_STEPS = "MaxIterationsReached"
KEPT_EVENTS = 80
"""How many events of the history its own default lets grow before it condenses them."""


@dataclass(frozen=True, slots=True)
class OpenHands:
    """See `turngate.harnesses.base.Harness`."""

    name: str = "openhands"
    package: str = "openhands"
    version: str = "1.16.0"
    source: Source = "pypi"
    python: tuple[int, int] = (3, 12)
    dialect: Dialect = "chat"
    quirks: tuple[str, ...] = (
        "tool arguments are parsed and written again by Python; broken ones come back as they were",
        "reasoning is dropped; texts come back as lists of parts",
        "every tool wants `security_risk` among its arguments; without it the call is refused and the model told so",
        "the system prompt ends with the time to the microsecond, the working directory and the kernel's release",
        "an answer without a call ends the run; so does the same call for the third time in a row with the same error",
        "after a context-length error it condenses and asks again without end, if compaction is on",
        "errors of the model leave status 0; they are read from its events",
        "where tmux is installed its shell runs in it, else in a terminal of its own",
    )
    unsupported: Mapping[str, str] = field(default_factory=lambda: {"side_calls": "openhands makes none; leave it out"})

    def offers_tools(self, options: HarnessOptions) -> bool:
        """With its tools on."""
        return options.tools

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """`openhands --headless`, then the same conversation resumed for each further prompt, in one shell."""
        words = [str(places.python), "-S", "-m", "openhands_cli.entrypoint", "--headless", "--json"]
        words += options.extra_args
        calls = []
        for number in range(len(prompts)):
            resumed = ["--resume", "--last"] if number else []
            calls.append(f'{shlex.join([*words, *resumed])} --task="${{{number + 1}}}"')
        return ["sh", "-c", " && ".join(calls), "openhands", *prompts]

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """Its agent's settings, and a file where skills would be cloned to."""
        model = {
            "model": f"openai/{endpoint.model}",
            "base_url": endpoint.base_url,
            "api_key": endpoint.api_key,
            "usage_id": "agent",
            "max_input_tokens": options.context_tokens,
            "max_output_tokens": options.max_answer_tokens,
            "reasoning_effort": None,
        }
        agent: dict[str, Any] = {"kind": "Agent", "llm": model, "system_prompt_kwargs": {"cli_mode": True}}
        if options.system_prompt is not None:
            agent["system_prompt"] = options.system_prompt
        if not options.tools:
            agent |= {"include_default_tools": [], "filter_tools_regex": "(?!)"}
        elif not options.subagents:
            agent["filter_tools_regex"] = "^(?!task$)"
        if options.compaction:
            sizes = {"max_size": KEPT_EVENTS, "max_tokens": options.context_tokens, "keep_first": 4}
            agent["condenser"] = {"kind": "LLMSummarizingCondenser", "llm": {**model, "usage_id": "condenser"}, **sizes}
        return {SETTINGS: json.dumps(agent), NO_SKILLS: ""}

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """Where its packages are, and nothing that would fetch or complain."""
        return {
            "PYTHONPATH": str(places.package / "site"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
            "OPENHANDS_SUPPRESS_BANNER": "1",
        }

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """Shell commands only: its file editor wants absolute paths. Several lines are one command of a shell."""
        if isinstance(step, Say):
            return wire.SaidTurn(content=step.text)
        command = as_shell(step)
        command = shlex.join(["bash", "-c", command]) if "\n" in command.strip() else command
        return call("terminal", command=command, security_risk="LOW")

    def verdict(self, output: Output) -> Verdict:
        """What it finished with, or its last words; an error of its own, other than too many steps, is a fault."""
        answer, steps, errors = "", 0, []
        for event in _events(output.stdout):
            kind = event.get("kind")
            if kind == "ActionEvent":
                steps += 1
                action = event.get("action") or {}
                answer = str(action.get("message", "")) if action.get("kind") == "FinishAction" else answer
            elif kind == "MessageEvent" and event.get("source") == "agent":
                parts = (event.get("llm_message") or {}).get("content") or ()
                answer = "".join(str(part.get("text", "")) for part in parts)
            elif kind == "ConversationErrorEvent":
                errors.append(event.get("code"))
        notes: dict[str, int | str] = {"steps": steps}
        if output.exit_code != 0:
            return Verdict(answer, f"harness_exit_{output.exit_code}", notes)
        fault = any(error != TOO_MANY_STEPS for error in errors)
        return Verdict(answer, "harness_error" if fault else None, notes)


def _events(stdout: str) -> Iterator[Mapping[str, Any]]:
    """Its events; whatever else it prints is passed over."""
    for line in stdout.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
