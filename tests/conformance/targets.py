"""What the suite runs against: Turngate, a plain vLLM server, OpenEnv's capture proxy; each by its public HTTP alone.

A target says what it does not offer by `NotOffered`, with the reason that the results show. It must never say so of
something that its users could rely on.
"""

from __future__ import annotations

import importlib.metadata
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import httpx

from bench.peer_openenv import VERSION as OPENENV_VERSION
from bench.peer_openenv import OpenEnvProxy
from tests.conformance.answers import Session
from tests.conformance.engines import Engine
from tests.gateway_process import GatewayProcess
from turngate.proxy import wire

CACHE_BLOCK_TOKENS = 32


class NotOffered(Exception):
    """The target has nothing that the defect could be in; the reason is told in the results."""


@dataclass(frozen=True)
class Row:
    """A path of tokens as a trainer gets it: `mask` 1 where a token was sampled and is to be trained."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]

    @property
    def completions(self) -> list[list[int]]:
        """The sampled tokens of each turn in it."""
        found: list[list[int]] = []
        before = 0
        for token, trained in zip(self.ids, self.mask, strict=True):
            if trained and not before:
                found.append([])
            if trained:
                found[-1].append(token)
            before = trained
        return found


class Target(Protocol):
    """What tests need of a target. `name` is its column, `version` what the results say of it."""

    name: str
    version: str

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def session(self, **options: Any) -> Session:
        """A new session. `temperature`: what the run samples with; `free`: not for training, anything may be asked;
        `concurrency`: requests at once."""

    def rows(self, session: Session) -> list[Row]:
        """What would be trained of a session, which ends with this."""

    def linked(self, session: Session) -> bool:
        """Whether the session's second turn continued the tokens of the first."""

    def publish(self, folder: Path) -> str:
        """A new version of the policy's adapter; the model name that it has for agents."""

    def withdraw(self, model: str) -> None:
        """No new request is to use that version."""

    def spread(self, relays: list[str]) -> list[Session]:
        """Sixteen sessions over several engines."""


class Turngate:
    """`turngate proxy` of this tree, in a process of its own."""

    name = "turngate"

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.version = f"turngate {importlib.metadata.version('turngate')}"
        self._engine, self._folder = engine, folder
        self._stack = ExitStack()
        self._sessions = 0
        self._gateway: GatewayProcess

    def __enter__(self) -> Self:
        self._gateway = self._stack.enter_context(GatewayProcess(self._engine.relay.url, self._folder / "store"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def session(self, **options: Any) -> Session:
        """See `Target`."""
        return self._opened(self._gateway, **options)

    def _opened(self, gateway: GatewayProcess, **options: Any) -> Session:
        self._sessions += 1
        new: dict[str, Any] = {"task": "conformance", "training": not options.get("free", False)}
        if new["training"]:
            new |= {"group": f"group-{self._sessions}", "group_size": 2}
        if "temperature" in options:
            new["sampling"] = {"temperature": options["temperature"]}
        if "concurrency" in options:
            new["budgets"] = {"max_concurrency": options["concurrency"]}
        created = gateway.client.create_rollout(wire.NewRollout.model_validate(new))
        return Session(created.base_url, created.api_key, "policy", id=f"{created.id} {new.get('group', '')}")

    def rows(self, session: Session) -> list[Row]:
        """See `Target`: the session and one without turns are a group, which is leased as a trainer would."""
        rollout, group = session.id.split(" ")
        client = self._gateway.client
        other = client.create_rollout(wire.NewRollout(task="conformance", group=group, group_size=2))
        client.finish_rollout(other.id, wire.FinishRollout(reward=0.0))
        if client.finish_rollout(rollout, wire.FinishRollout(reward=1.0)).outcome == "unscorable":
            return []  # an agent was told of an engine's fault
        leased = client.lease(wire.NewLease(policy="policy", max_groups=100))
        ours = next(one for one in leased.groups if one.id == group)
        rows = next(one.rows for one in ours.rollouts if one.id == rollout)
        found = [row.unpack() for row in rows]
        return [Row(row.ids.tolist(), row.mask.tolist(), row.logprobs.tolist()) for row in found]

    def linked(self, session: Session) -> bool:
        """See `Target`."""
        return [len(row.completions) for row in self.rows(session)] == [2]

    def publish(self, folder: Path) -> str:
        """See `Target`; agents ask for the policy, and get the newest."""
        info = self._gateway.client.publish_adapter(wire.PublishAdapter(policy="policy", path=str(folder), step=1))
        return f"v{info.version}"

    def withdraw(self, model: str) -> None:
        """A newer version takes its place, which is how versions go here."""

    def spread(self, relays: list[str]) -> list[Session]:
        """See `Target`."""
        store = self._folder / "several" / "store"
        options = [word for url in relays[1:] for word in ("--engine", url)]
        gateway = self._stack.enter_context(GatewayProcess(relays[0], store, *options))
        return [self._opened(gateway) for _ in range(16)]


class PlainVllm:
    """The engine without anything before it, as its own users ask it for tokens: `return_token_ids` and `logprobs`."""

    name = "vllm"

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.version, self._engine = engine.name, engine
        self._cached = self._published = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def session(self, **options: Any) -> Session:
        """See `Target`: there are none; what is asked in its name is kept with it."""
        if "temperature" in options:
            raise NotOffered("no sampling policy apart from the request's own")
        if "concurrency" in options:
            raise NotOffered("no limit a client; `--max-num-seqs` bounds what runs at once")
        self._cached = self._engine.cached_tokens()
        extra = {} if options.get("free") else {"return_token_ids": True, "logprobs": True}
        return Session(f"{self._engine.relay.url}/v1", "none", self._engine.model, extra=extra)

    def rows(self, session: Session) -> list[Row]:
        """See `Target`: each answer by itself, from what came with it."""
        rows = []
        for answer in session.kept:
            choice = answer.choice
            logprobs = [0.0] * len(answer.prompt_ids) + choice.logprobs
            mask = [0] * len(answer.prompt_ids) + [1] * len(choice.token_ids)
            rows.append(Row(answer.prompt_ids + choice.token_ids, mask, logprobs))
        return rows

    def linked(self, session: Session) -> bool:
        """See `Target`: whether the prefix cache held more than a few blocks of the second prompt."""
        return self._engine.cached_tokens() - self._cached >= 4 * CACHE_BLOCK_TOKENS

    def publish(self, folder: Path) -> str:
        """See `Target`."""
        self._published += 1
        body = {"lora_name": f"conformance-{self._published}", "lora_path": str(folder)}
        httpx.post(
            f"{self._engine.relay.url}/v1/load_lora_adapter", json=body, timeout=120, trust_env=False
        ).raise_for_status()
        return str(body["lora_name"])

    def withdraw(self, model: str) -> None:
        """See `Target`."""
        url = f"{self._engine.relay.url}/v1/unload_lora_adapter"
        httpx.post(url, json={"lora_name": model}, timeout=120, trust_env=False).raise_for_status()

    def spread(self, relays: list[str]) -> list[Session]:
        """See `Target`."""
        raise NotOffered("one server; nothing is routed")


class OpenEnv:
    """OpenEnv's capture proxy, installed from PyPI into an environment of its own."""

    name = "openenv"
    version = f"openenv {OPENENV_VERSION}"

    def __init__(self, engine: Engine, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._engine = engine
        self._proxy = OpenEnvProxy([engine.relay.url], folder, model=engine.model)

    def __enter__(self) -> Self:
        self._proxy.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._proxy.__exit__(kind, error, trace)

    def session(self, **options: Any) -> Session:
        """See `Target`; `free` is its purpose `eval`."""
        if "concurrency" in options:
            raise NotOffered("no limit of requests at once, the engine's own holds")
        body: dict[str, Any] = {"purpose": "eval"} if options.get("free") else {}
        if "temperature" in options:
            body["sampling"] = {"temperature": options["temperature"]}
        answer = httpx.post(f"{self._proxy.url}/sessions", json=body, timeout=60, trust_env=False).raise_for_status()
        key = str(answer.json()["session_id"])
        return Session(f"{self._proxy.url}/v1", key, self._engine.model, id=key)

    def rows(self, session: Session) -> list[Row]:
        """See `Target`: the sequences it marks as trainable."""
        url = f"{self._proxy.url}/sessions/{session.id}/rollout"
        told = httpx.get(url, timeout=60, trust_env=False).raise_for_status().json()
        return [
            Row(one["input_ids"], one["loss_mask"], one["logprobs"])
            for one in (told["sequences"] if told["trainable"] else ())
            if one["trainable"]
        ]

    def linked(self, session: Session) -> bool:
        """See `Target`."""
        return [len(row.completions) for row in self.rows(session)] == [2]

    def publish(self, folder: Path) -> str:
        """See `Target`."""
        raise NotOffered("no adapters")

    def withdraw(self, model: str) -> None:
        """See `Target`."""
        raise NotOffered("no adapters")

    def spread(self, relays: list[str]) -> list[Session]:
        """See `Target`."""
        raise NotOffered("each session names its engine; nothing is routed")


TARGETS: dict[str, type[Turngate] | type[PlainVllm] | type[OpenEnv]] = {
    one.name: one for one in (Turngate, PlainVllm, OpenEnv)
}
