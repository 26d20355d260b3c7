"""What a harness declares: package and pinned version, dialect, and the files, environment and command of one run.

A harness is a value without state: the runner asks it what to put into a sandbox and how to read what came out. It must
never start a process, open a connection or look at the host's own environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from turngate.proxy import wire
from turngate.tasks.steps import Step

Dialect = Literal["chat", "responses", "messages", "gemini"]
Source = Literal["npm", "pypi", "none"]
"""Where a harness is installed from: `templates/<name>/` holds its package-lock.json (npm) or requirements.lock
(pypi); none needs no installation."""


class HarnessOptions(BaseModel):
    """Options every harness understands as far as its command line can; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")

    tools: bool = Field(True, description="whether the agent gets its tools; false leaves a plain conversation")
    system_prompt: str | None = Field(None, description="replaces the harness's own system prompt")
    context_tokens: int = Field(8192, ge=256, description="context window the harness believes the model has")
    max_answer_tokens: int = Field(1024, ge=1, description="longest answer of one turn the harness asks for")
    subagents: bool = Field(True, description="whether the agent may start agents of its own, where it has any")
    compaction: bool = Field(False, description="whether the agent may shorten its own history when it grows long")
    side_calls: bool = Field(False, description="whether the agent makes calls beside its work, such as titles")
    extra_args: list[str] = Field(default_factory=list, description="more arguments for the harness's command line")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the agent finds its model: as seen from inside the sandbox."""

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class Places:
    """Absolute paths inside the sandbox: the installation, node, the home, the working directory, Python."""

    package: PurePosixPath
    node: PurePosixPath
    home: PurePosixPath
    workspace: PurePosixPath
    python: PurePosixPath = field(default_factory=lambda: PurePosixPath("python3"))


@dataclass(frozen=True, slots=True)
class Output:
    """What one run of a harness left behind; texts are decoded with replacement and cut to the sandbox's limit."""

    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a harness's own output is to be read. `fault` is None when the run may be scored."""

    answer: str
    fault: str | None = None
    notes: Mapping[str, int | str] = field(default_factory=dict)


class Harness(Protocol):
    """One agent. `quirks` lists behaviour that readers of its trajectories should know."""

    @property
    def name(self) -> str:
        """The word used in settings."""

    @property
    def package(self) -> str:
        """The registry package it is installed from."""

    @property
    def version(self) -> str:
        """The pinned version."""

    @property
    def source(self) -> Source:
        """How it is installed."""

    @property
    def dialect(self) -> Dialect:
        """The wire it speaks."""

    @property
    def quirks(self) -> tuple[str, ...]:
        """What to know about its turns, one sentence each."""

    @property
    def unsupported(self) -> Mapping[str, str]:
        """Options it cannot follow when set: name -> why, and what to do instead."""

    def offers_tools(self, options: HarnessOptions) -> bool:
        """Whether its main conversation offers tools to the model: then a call without them is a side call."""

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """The argument vector that runs all `prompts`, in order, in one session."""

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """Configuration files: path relative to the home directory -> text."""

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """Environment variables it needs besides HOME and PATH."""

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """How this agent's model takes a step of a solution: a call of the agent's own tool, or the last words."""

    def verdict(self, output: Output) -> Verdict:
        """The final answer, and whether the exit was a fault of the harness."""


@runtime_checkable
class InProcess(Protocol):
    """A harness that is no program: the runner itself holds the conversation, without a sandbox."""

    async def converse(self, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> Output:
        """Send all `prompts`, in order, in one session.

        Raises:
            Fault: the conversation could not be held.
        """

    def verdict(self, output: Output) -> Verdict:
        """See `Harness`."""


@runtime_checkable
class OnePython(Protocol):
    """A PyPI harness that runs on one version of Python only; the others run on the runner's own."""

    @property
    def python(self) -> tuple[int, int]:
        """That version."""


def call(name: str, **arguments: Any) -> wire.SaidTurn:
    """A turn that is one tool call."""
    return wire.SaidTurn(tool_calls=[wire.SaidCall(name=name, arguments=arguments)])
