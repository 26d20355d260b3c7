"""How each agent's model calls a shell, starts an agent below, and ends; the scenarios are written in these words."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from turngate.harnesses.mini_swe_agent import SUBMIT


@dataclass(frozen=True)
class Words:
    """An agent's tool for shell commands: its name, the argument with the command, and other arguments it needs.

    `number` is an optional numeric argument, `agent` the tool that starts an agent below, with `{prompt}` in its
    arguments, `reports` the tool that such an agent ends with, with `{text}` in them. `submits`: it ends by a command.
    """

    shell: str
    command: str
    more: dict[str, Any] = field(default_factory=dict)
    number: str | None = None
    agent: tuple[str, str] | None = None
    reports: tuple[str, str] | None = None
    submits: bool = False

    def run(self, command: str, **said: Any) -> dict[str, Any]:
        """An answer that runs one command."""
        return {**said, "tool_calls": [self.call(command)]}

    def call(self, command: str) -> dict[str, Any]:
        """A call of the shell."""
        return {"name": self.shell, "arguments": {**self.more, self.command: command}}

    def odd(self, command: str) -> dict[str, Any]:
        """A call of the shell with the arguments' JSON as given, `$KEY` and `$MORE` filled in."""
        more = "".join(f' "{key}" :{json.dumps(value)},' for key, value in self.more.items())
        number = f' "{self.number}" : 1e4,' if self.number else ""
        text = command.replace("$KEY", self.command).replace("$MORE", more).replace("$NUMBER", number)
        return {"name": self.shell, "arguments": text}

    def last(self, text: str, **said: Any) -> Any:
        """The answer that ends the run."""
        if self.submits:
            return self.run(f"echo {SUBMIT}\necho '{text}'", **said)
        return {**said, "content": text} if said else text

    def begin(self, prompt: str) -> dict[str, Any]:
        """A call that starts an agent below on `prompt`.

        Raises:
            LookupError: it has no such tool.
        """
        if self.agent is None:
            raise LookupError("it starts no agents below")
        name, arguments = self.agent
        return {"name": name, "arguments": json.loads(arguments.replace("{prompt}", prompt))}

    def report(self, text: str) -> Any:
        """The last answer of an agent below."""
        if self.reports is None:
            return text
        name, arguments = self.reports
        return {"tool_calls": [{"name": name, "arguments": json.loads(arguments.replace("{text}", text))}]}


WORDS = {
    "pi": Words("bash", "command", number="timeout"),
    "opencode": Words(
        "bash",
        "command",
        {"description": "Work"},
        "timeout",
        ("task", '{"description": "part", "prompt": "{prompt}", "subagent_type": "general"}'),
    ),
    "mini-swe-agent": Words("bash", "command", submits=True),
    "codex": Words("exec_command", "cmd", agent=("multi_agent_v1__spawn_agent", '{"message": "{prompt}"}')),
    "claude-code": Words(
        "Bash",
        "command",
        {"description": "Work"},
        "timeout",
        ("Agent", '{"description": "part", "prompt": "{prompt}", "subagent_type": "claude"}'),
    ),
    "gemini-cli": Words(
        "run_shell_command",
        "command",
        {"description": "Work"},
        None,
        ("invoke_agent", '{"agent_name": "generalist", "prompt": "{prompt}"}'),
        ("complete_task", '{"result": {"response": "{text}"}}'),
    ),
}
