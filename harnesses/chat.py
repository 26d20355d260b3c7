"""No agent: the prompts of a task as one plain conversation, so that reasoning tasks train through the same loop.

It runs in the runner's own process and needs no sandbox, but every turn passes the gateway like any agent's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from turngate.harnesses.base import Dialect, Endpoint, HarnessOptions, Output, Places, Source, Verdict
from turngate.harnesses.errors import Fault
from turngate.proxy import wire
from turngate.tasks.steps import Say, Step, as_shell

BUSY = frozenset({429, 502, 503, 504})
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Chat:
    """See `turngate.harnesses.base.Harness` and `InProcess`."""

    name: str = "chat"
    package: str = "none"
    version: str = "1"
    source: Source = "none"
    dialect: Dialect = "chat"
    quirks: tuple[str, ...] = (
        "no tools, no system prompt unless one is set, answers not streamed",
        "an answer cut by the token limit stays in the history and is marked answer_cut",
    )
    unsupported: Mapping[str, str] = field(
        default_factory=lambda: {
            "extra_args": "chat has no command line; use the other options",
            "compaction": "chat keeps its whole history; leave it out",
            "side_calls": "chat makes none; leave it out",
        }
    )

    def offers_tools(self, options: HarnessOptions) -> bool:
        """Never."""
        return False

    async def converse(self, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> Output:
        """Send the prompts one after another; the last answer is the output.

        Raises:
            Fault: `harness_error`: the gateway refused a turn.
        """
        messages = [] if options.system_prompt is None else [{"role": "system", "content": options.system_prompt}]
        answer, cut = "", ""
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=None) as client:
            for prompt in prompts:
                messages.append({"role": "user", "content": prompt})
                body = {"model": endpoint.model, "messages": messages, "max_tokens": options.max_answer_tokens}
                choice = await _ask(client, f"{endpoint.base_url}/chat/completions", body)
                answer = choice["message"].get("content") or ""
                cut = "cut" if choice.get("finish_reason") == "length" else cut
                messages.append({"role": "assistant", "content": answer})
        return Output(0, answer, cut)

    def play(self, step: Step, options: HarnessOptions) -> wire.SaidTurn:
        """It has no tools: what a tool would do is said in words."""
        return wire.SaidTurn(content=step.text if isinstance(step, Say) else as_shell(step))

    def command(self, places: Places, endpoint: Endpoint, prompts: Sequence[str], options: HarnessOptions) -> list[str]:
        """Nothing is started."""
        return []

    def files(self, endpoint: Endpoint, options: HarnessOptions) -> dict[str, str]:
        """None."""
        return {}

    def env(self, places: Places, endpoint: Endpoint) -> dict[str, str]:
        """None."""
        return {}

    def verdict(self, output: Output) -> Verdict:
        """The answer as it is."""
        return Verdict(output.stdout, notes={"answer_cut": 1} if output.stderr else {})


async def _ask(client: httpx.AsyncClient, url: str, body: Mapping[str, object]) -> dict[str, Any]:
    """The choice of one completion; asks again while the gateway says that it is busy."""
    while True:
        try:
            response = await client.post(url, json=body)
        except httpx.HTTPError as error:
            raise Fault("harness_error", f"no answer from the gateway: {error!r}") from error
        if response.status_code not in BUSY:
            break
        await asyncio.sleep(PAUSE_S)
    if response.status_code != 200:
        raise Fault("harness_error", f"status {response.status_code}: {response.text[:300]}")
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice
