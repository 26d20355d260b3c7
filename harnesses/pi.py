"""pi (`@earendil-works/pi-coding-agent`), headless: several prompts in one session, chat completions, streamed.

Its prompt depends on the working directory only, so rollouts of a group share their first tokens. Automatic compaction
is switched off: with it pi silently removes a turn that was cut by its token limit, and the history would break.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turngate.harnesses.base import Dialect, Endpoint, HarnessOptions, Output, Places, Source, Verdict, call
from turngate.proxy import wire
from turngate.tasks.steps import Bash, Edit, Read, Say, Step, Write

PROVIDER = "turngate"
CUT_NOTICE = "Response was truncated"
"""What pi says on stderr, with status 1, when the last turn hit its token limit: the model's doing, not a fault."""


@dataclass(frozen=True, slots=True)
class Pi:
    """See `turngate.harnesses.base.Harness`."""

    name: str = "pi"
    package: str = "@earendil-works/pi-coding-agent"
    version: str = "1.6.0"
    source: Source = "npm"
    dialect: Dialect = "chat"
    quirks: tuple[str, ...] = (
        "tool arguments are parsed and written again by JavaScript; broken JSON becomes {}",
        "an answer without text is sent back with content null",
        "a last turn cut by the token limit ends the run with status 1; it is scored all the same",
        "after a context-length error it ends with status 0 and no output",
        "the system prompt ends with the working directory and nothing else that varies",
    )
    unsupported: Mapping[str, str] = field(
        default_factory=lambda: {
            "compaction": "pi's compaction silently removes a turn that was cut by its token limit; leave it out",
            "side_calls": "pi makes none; leave it out",
        }
    )

    def offers_tools(self, options: HarnessOptions) -> bool:
        """With its tools on."""
        return options.tools

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """`node pi -p …` with everything switched off that could differ between runs."""
        cli = places.package / "node_modules" / self.package / "dist" / "bundle" / "cli.js"
        words = [str(places.node), str(cli), "-p", "--provider", PROVIDER, "--model", endpoint.model]
        words += ["--no-session", "--no-mcp", "--no-extensions", "--no-skills", "--no-context-files"]
        words += ["--no-prompt-templates", "--no-themes", "--thinking", "off"]
        if not options.tools:
            words.append("--no-tools")
        if options.system_prompt is not None:
            words += ["--system-prompt", options.system_prompt]
        return [*words, *options.extra_args, "--", *prompts]

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """The provider that points at the gateway, and settings without compaction."""
        model = {
            "id": endpoint.model,
            "contextWindow": options.context_tokens,
            "maxTokens": options.max_answer_tokens,
        }
        provider = {
            "baseUrl": endpoint.base_url,
            "apiKey": endpoint.api_key,
            "api": "openai-completions",
            "compat": {"supportsDeveloperRole": False},
            "models": [model],
        }
        settings = {"compaction": {"enabled": False}, "quietStartup": True, "enableInstallTelemetry": False}
        return {
            ".pi/agent/models.json": json.dumps({"providers": {PROVIDER: provider}}),
            ".pi/agent/settings.json": json.dumps(settings),
        }

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """No start-up network calls, no telemetry."""
        return {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"}

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """pi's tools bash, read, write and edit; paths are relative to the workspace."""
        match step:
            case Say():
                return wire.SaidTurn(content=step.text)
            case Bash():
                return call("bash", command=step.command)
            case Read():
                return call("read", path=step.path)
            case Write():
                return call("write", path=step.path, content=step.content)
            case Edit():
                return call("edit", path=step.path, edits=[{"oldText": step.old, "newText": step.new}])

    def verdict(self, output: Output) -> Verdict:
        """pi prints the last answer and one newline; status 1 with the truncation notice is no fault."""
        answer = output.stdout.removesuffix("\n")
        if output.exit_code == 0:
            return Verdict(answer)
        if output.exit_code == 1 and CUT_NOTICE in output.stderr:
            return Verdict(answer, notes={"answer_cut": 1})
        return Verdict(answer, fault=f"harness_exit_{output.exit_code}")
