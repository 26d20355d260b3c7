"""Seams on the real vLLM: it goes on as it would have, and draws anew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from tests.engines import RealEngine
from turngate.proxy.engine import EngineHttp, GenerateCall, Replica
from turngate.proxy.engine.continuation import continued

pytestmark = pytest.mark.engine

WORD = [{"role": "user", "content": "Say any one word that comes to your mind, as unusual as you can."}]


@pytest.fixture
async def replica(smollm_engine: RealEngine) -> AsyncIterator[tuple[Replica, GenerateCall]]:
    http = EngineHttp()
    found = Replica("r", smollm_engine.url, http)
    rendered = await found.render({"model": smollm_engine.model, "messages": WORD})
    params = {**rendered.sampling_params, "ignore_eos": True}
    yield found, GenerateCall(smollm_engine.model, rendered.ids, params, rendered.extra, "seam")
    await http.aclose()


async def sample(replica: Replica, call: GenerateCall) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    logprobs: list[float] = []
    async for chunk in replica.generate(call):
        ids += chunk.ids
        logprobs += chunk.logprobs
    return ids, logprobs


async def test_the_likeliest_answer_is_the_same_with_a_seam_in_it(replica: tuple[Replica, GenerateCall]) -> None:
    engine, call = replica
    call = replace(call, sampling_params={**call.sampling_params, "temperature": 0.0, "max_tokens": 12})
    ids, logprobs = await sample(engine, call)
    rest_ids, rest_logprobs = await sample(engine, continued(call, ids[:5]))
    assert rest_ids == ids[5:]
    assert np.allclose(rest_logprobs, logprobs[5:], atol=1e-3)


async def test_the_first_draw_after_a_seam_is_not_the_first_draw_again(replica: tuple[Replica, GenerateCall]) -> None:
    """The same seed again repeats it: 7 of 24 times here. Hot, so that chance alone does so once in hundreds."""
    engine, call = replica
    repeated = 0
    for number in range(24):
        seed = {"seed": number} if number % 2 else {}
        params = {**call.sampling_params, "temperature": 1.5, "top_k": 0, "top_p": 1.0, "max_tokens": 3, **seed}
        one = replace(call, sampling_params=params, request_id=f"seam-{number}")
        ids, _ = await sample(engine, one)
        onward = continued(one, ids[:2])
        (token,), _ = await sample(engine, onward)
        repeated += token == ids[0]
    assert repeated <= 2
