"""mini-swe-agent, headless: one instruction, one shell command a turn, answers never streamed.

With tools a turn is a call of its `bash` tool; without, text in and text out, so any engine serves it. It runs as its
own default agent (not the interactive one) with its own prompts; only names, limits and the endpoint are ours.
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

CONFIG = ".config/mini-swe-agent/turngate.yaml"
TRAJECTORY = ".local/trajectory.json"
RUN_AND_TELL = '"$@" >&2; code=$?; "$1" -c "$TELL" "$HOME/' + TRAJECTORY + '"; exit $code'
TELL = """
import json, sys
run = json.load(open(sys.argv[1]))
said = [m.get("content") or "" for m in run["messages"] if m.get("role") == "assistant"]
print(json.dumps({**{k: run["info"][k] for k in ("exit_status", "submission")}, "said": said[-1:], "turns": len(said)}))
"""
"""Printed after the run: how it ended, what was submitted, its last words."""

SUBMIT, FENCE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "mswea_bash_command"
"""The line that ends a run when a command prints it first, and the language of a command's block in a text."""

FAULTS = frozenset({"LimitsExceeded", "TimeExceeded"})


@dataclass(frozen=True, slots=True)
class MiniSweAgent:
    """See `turngate.harnesses.base.Harness`."""

    name: str = "mini-swe-agent"
    package: str = "mini-swe-agent"
    version: str = "2.4.6"
    source: Source = "pypi"
    dialect: Dialect = "chat"
    quirks: tuple[str, ...] = (
        "history comes back verbatim, broken tool arguments too",
        "a turn without exactly one command is dropped from its history and a note is sent instead: a break",
        "three such turns in a row end the run; it is scored all the same",
        "it ends only on its own submit phrase, so give it a deadline",
        "the first prompt holds the kernel's release and version",
    )
    unsupported: Mapping[str, str] = field(
        default_factory=lambda: {
            "prompts": "mini-swe-agent takes one instruction a run; choose tasks with one prompt",
            "compaction": "mini-swe-agent keeps its whole history; leave it out",
            "side_calls": "mini-swe-agent makes none; leave it out",
        }
    )

    def offers_tools(self, options: HarnessOptions) -> bool:
        """Its one tool, `bash`, unless it speaks text only."""
        return options.tools

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """Shell commands only, one a turn: by its tool, or as a fenced block; the last words are what it submits."""
        command = as_shell(step)
        if isinstance(step, Say):
            command = f"echo {SUBMIT}\necho {shlex.quote(step.text)}"
        if options.tools:
            return call("bash", command=command)
        return wire.SaidTurn(content=f"```{FENCE}\n{command}\n```")

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """Its command line under the Python it was installed for, then a line of JSON on how it ended."""
        words = [str(places.python), "-S", "-m", "minisweagent.run.mini", "-m", f"openai/{endpoint.model}", "-y"]
        words += ["-c", "mini.yaml" if options.tools else "mini_textbased.yaml", "-c", str(places.home / CONFIG)]
        words += ["--agent-class", "default", "-o", str(places.home / TRAJECTORY), *options.extra_args]
        return ["sh", "-c", RUN_AND_TELL, "mini", *words, "-t", prompts[0]]

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """What differs from its own configuration."""
        agent: dict[str, Any] = {"cost_limit": 0, "max_consecutive_format_errors": 3}
        if options.system_prompt is not None:
            agent["system_template"] = "{% raw %}" + options.system_prompt + "{% endraw %}"
        model: dict[str, Any] = {"model_kwargs": {"max_tokens": options.max_answer_tokens}}
        if not options.tools:
            model["model_class"] = "litellm_textbased"
        return {CONFIG: json.dumps({"agent": agent, "model": model})}

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """Where its packages are, the endpoint, and nothing that would ask or fetch."""
        return {
            "PYTHONPATH": str(places.package / "site"),
            "OPENAI_API_BASE": endpoint.base_url,
            "OPENAI_API_KEY": endpoint.api_key,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "TELL": TELL,
        }

    def verdict(self, output: Output) -> Verdict:
        """The submission, or else its last words; a limit of its own, or a crash, is a fault."""
        try:
            told = json.loads(output.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            told = {}
        status = str(told.get("exit_status", ""))
        answer = str(told.get("submission") or "\n".join(told.get("said", ())))
        notes: dict[str, int | str] = {"exit_status": status, "steps": int(told.get("turns", 0))}
        if output.exit_code != 0:
            return Verdict(answer, f"harness_exit_{output.exit_code}", notes)
        return Verdict(answer, "harness_error" if status in FAULTS or not told else None, notes)
