"""Stand-ins for tests of scheduling and faults: an agent that is a shell script, a gateway that only keeps books."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests import statuses
from turngate.harnesses.base import Dialect, Endpoint, HarnessOptions, Output, Places, Source, Verdict
from turngate.harnesses.errors import Fault
from turngate.proxy import wire
from turngate.tasks.steps import Step, as_shell


@dataclass(frozen=True)
class ScriptHarness:
    """An agent whose whole behaviour is a bash script; it answers with what it prints."""

    script: str
    name: str = "script"
    package: str = "none"
    version: str = "0"
    source: Source = "none"
    dialect: Dialect = "chat"
    quirks: tuple[str, ...] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """Words only."""
        return wire.SaidTurn(content=as_shell(step))

    def offers_tools(self, options: HarnessOptions) -> bool:
        """No tools."""
        return False

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """Run the script; `$1` is the base URL, the prompts follow."""
        return ["bash", "-c", self.script, "agent", endpoint.base_url, *prompts]

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """One file, to see that it arrives."""
        return {".config/agent": endpoint.base_url}

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """Nothing."""
        return {}

    def verdict(self, output: Output) -> Verdict:
        """Any status but 0 is a fault."""
        return Verdict(output.stdout, None if output.exit_code == 0 else f"harness_exit_{output.exit_code}")


@dataclass
class BookGateway:
    """What the runner needs of `PatientGateway`, kept in lists; `turns` is what every rollout is said to have had."""

    turns: int = 1
    ready_groups: int = 0
    down: bool = False
    wrong_key: bool = False
    refuses: dict[str, str] = field(default_factory=dict)
    """Words with which sessions of these tasks are refused; `*`: of every task."""
    refuses_to_finish: str = ""
    refuses_status: str = ""
    created: list[wire.NewRollout] = field(default_factory=list)
    finished: dict[str, wire.FinishRollout] = field(default_factory=dict)
    new: dict[str, wire.NewRollout] = field(default_factory=dict)
    closed_groups: set[str] = field(default_factory=set)
    hold_create_s: float = 0.0
    closes_itself: wire.FinishRollout | None = None
    turns_by_session: dict[str, int] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def create(self, new: wire.NewRollout) -> wire.RolloutCreated:
        """Open a session that leads nowhere."""
        if self.down:
            raise Fault("gateway_unavailable", "down")
        if self.wrong_key:
            raise Fault("gateway_refused", "status 401: this needs the administration key")
        if words := self.refuses.get(new.task, self.refuses.get("*", "")):
            raise Fault("gateway_refused", f"{words} ({new.group})")
        if new.group in self.closed_groups:
            raise Fault("gateway_refused", f"status 409: group {new.group} is closed (ready)")
        self.created.append(new)
        number = next(self._numbers)
        self.new[f"rollout{number}"] = new
        await asyncio.sleep(self.hold_create_s)
        url = f"http://127.0.0.1:9/s/secret{number}/v1"
        return wire.RolloutCreated(id=f"rollout{number}", base_url=url, api_key="key", policy="policy", version=3)

    async def finish(self, rollout: str, result: wire.FinishRollout) -> wire.RolloutInfo:
        """Keep the result, unless it has closed the rollout itself."""
        if self.refuses_to_finish:
            raise Fault("gateway_refused", f"{self.refuses_to_finish} ({rollout})")
        if self.closes_itself is not None:
            self.finished[rollout] = self.closes_itself
            raise Fault("gateway_refused", f"status 409: rollout {rollout} was finished as cancelled")
        self.finished[rollout] = result
        return self._info(rollout)

    async def rollout(self, rollout: str) -> wire.RolloutInfo:
        """Say how many turns it had."""
        return self._info(rollout)

    async def open_rollouts(self) -> list[wire.RolloutInfo]:
        """Sessions nobody finished."""
        return [self._info(rollout) for rollout in self.new if rollout not in self.finished]

    async def group_rollouts(self, group: str) -> list[wire.RolloutInfo]:
        """All of a group."""
        return [self._info(rollout) for rollout, new in self.new.items() if new.group == group]

    async def status(self) -> wire.Status:
        """Only `groups` matters."""
        if self.refuses_status:
            raise Fault("gateway_refused", self.refuses_status)
        return statuses.status({"ready": self.ready_groups}, finished=len(self.finished))

    def _info(self, rollout: str) -> wire.RolloutInfo:
        new, told = self.new[rollout], self.finished.get(rollout)
        return wire.RolloutInfo(
            id=rollout,
            task=new.task,
            group=new.group,
            harness="script",
            policy="policy",
            version=3,
            state="finished" if told else "open",
            outcome=told.outcome if told else None,
            cause=told.cause if told else None,
            reward=told.reward if told else None,
            rewards={},
            metrics={},
            metadata=new.metadata,
            created_at_ns=0,
            finished_at_ns=1 if told else None,
            replaced=bool(told and told.replaced),
            turns=self.turns_by_session.get(rollout, self.turns),
            breaks=0,
            prompt_tokens=0,
            completion_tokens=0,
        )
