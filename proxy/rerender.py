"""Rendering demonstrations again: does the student's engine write the recorded conversation with exactly these tokens?

Each turn of a demonstration is rendered twice by its own messages: up to where its answer begins, and with the answer.
The first must be its prompt, the second prompt and completion up to the end-of-turn token, so the loss mask covers the
assistant's tokens and nothing else. It reads the store and asks the engine; it writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from turngate.proxy.demonstration import APART
from turngate.proxy.dialects.chat import RENDER_KEYS
from turngate.proxy.engine.errors import EngineFault
from turngate.proxy.engine.wire import parse_rendered, render_body
from turngate.proxy.prompting import renderable
from turngate.proxy.rescore import RescoreError
from turngate.proxy.turns import IntArray, Turn, full_messages, prompt_ids


@dataclass(slots=True)
class Rerendered:
    """`turns` demonstrations compared; `apart` were cut from a short rendering and only their answers compared."""

    engine: str
    turns: int = 0
    tokens: int = 0
    apart: int = 0
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """As one JSON object."""
        return {name: getattr(self, name) for name in self.__slots__}


class Rerenderer:
    """Asks one vLLM server; use as a context manager. `ends` are the ids that end an assistant's turn."""

    def __init__(self, url: str, ends: frozenset[int], *, timeout_s: float = 600.0) -> None:
        self._ends = ends
        self.result = Rerendered(url)
        self._http = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Rerenderer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def check(self, known: Mapping[str, Turn], turn: Turn) -> None:
        """Compare one demonstration; `known` are the turns of its rollout by id.

        Raises:
            RescoreError: the engine does not render as vLLM does.
        """
        result = self.result
        if APART in turn.flags:
            result.apart += 1
            return
        result.turns += 1
        result.tokens += len(turn.completion_ids)
        history, answer = full_messages(known, turn), {**turn.response, "content": turn.response.get("content") or ""}
        prompt = self._ids(known, turn, history, generation=True)
        whole = self._ids(known, turn, [*history, answer], generation=False)
        recorded, said = prompt_ids(known, turn), turn.completion_ids
        problem = None
        if not np.array_equal(prompt, recorded):
            problem = f"its prompt has {len(recorded)} tokens, the engine renders {len(prompt)} others"
        elif not np.array_equal(whole[len(prompt) : len(prompt) + len(said)], said):
            problem = f"the engine does not render its answer as the {len(said)} recorded tokens"
        elif not self._ends_turn(whole, len(prompt) + len(said), cut=turn.finish_reason == "length"):
            problem = "it does not end with the token that ends an assistant's turn where the engine ends it"
        if problem is not None:
            result.problems.append(f"rollout {turn.rollout} turn {turn.id} (seq {turn.seq}): {problem}")

    def _ids(self, known: Mapping[str, Turn], turn: Turn, messages: list[Any], *, generation: bool) -> IntArray:
        root = turn
        while root.kind == "spliced" and root.base is not None:
            root = known[root.base]
        params = turn.request.get("params") or {}
        body: dict[str, Any] = {key: params[key] for key in RENDER_KEYS if params.get(key) is not None}
        body |= {"messages": [renderable(message) for message in messages], "add_generation_prompt": generation}
        if root.request.get("tools"):
            body["tools"] = root.request["tools"]
        try:
            answer = self._http.post("/v1/chat/completions/render", json=render_body(body, None))
            answer.raise_for_status()
            return parse_rendered(answer.json()).ids
        except httpx.HTTPStatusError as error:
            text = error.response.text[:300]
            raise RescoreError(
                f"{self.result.engine} does not render: HTTP {error.response.status_code}: {text}"
            ) from error
        except (httpx.HTTPError, ValueError, EngineFault) as error:
            raise RescoreError(f"{self.result.engine} does not render as vLLM does: {error}") from error

    def _ends_turn(self, whole: IntArray, end: int, *, cut: bool) -> bool:
        """Whether the rendering's last end of turn is the answer's last token, before `end`; of a cut one, the next."""
        ends = np.flatnonzero(np.isin(whole, list(self._ends)))
        return len(ends) > 0 and int(ends[-1]) == (end if cut else end - 1)
