"""Turns and whole stores to test with: a rollout of three turns with a break, as the gateway would record it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turngate.proxy import wire
from turngate.proxy.rows import build_rows
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.layout import StoreFolder
from turngate.proxy.store.turnstore import TurnStore
from turngate.proxy.turns import Span, Timings, Turn

STOP_ID = 2
SECOND_NS = 10**9
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def make_turn(rollout: str, seq: int, base: Turn | None = None, **changed: Any) -> Turn:
    """A stopped turn of five sampled tokens; it continues the whole path of `base`."""
    rng = np.random.default_rng([seq, *rollout.encode()])
    completion_ids = np.append(rng.integers(100, 1000, 4), STOP_ID).astype(np.int32)
    values: dict[str, Any] = {
        "id": f"{rollout}-turn-{seq}",
        "rollout": rollout,
        "seq": seq,
        "kind": "first" if base is None else "spliced",
        "base": base.id if base else None,
        "base_tokens": base.path_tokens if base else 0,
        "break_cause": None,
        "tail_ids": rng.integers(100, 1000, 6).astype(np.int32),
        "completion_ids": completion_ids,
        "logprobs": -rng.random(5).astype(np.float32) - 0.01,
        "spans": (Span(0, 5, "policy", 0, None),),
        "finish_reason": "stop",
        "stop_reason": None,
        "timings": Timings(seq, 1, 2, 3, 4),
        "sampling_used": {"temperature": 1.0, "max_tokens": 64},
        "request": {
            "messages": [{"role": "user", "content": f"question {seq} ünï ✓"}],
            "tools": TOOLS if base is None else None,
            "params": {},
        },
        "response": {"role": "assistant", "content": f"answer {seq}"},
    }
    return Turn(**(values | changed))


def make_rollout_turns(rollout: str) -> list[Turn]:
    """first -> spliced, then a break that shares the head of the first turn: two rows."""
    first = make_turn(rollout, 0)
    second = make_turn(rollout, 1, first)
    broken = make_turn(rollout, 2, first, kind="break", base_tokens=4, break_cause="history_rewritten")
    return [first, second, broken]


@dataclass
class SampleStore:
    """A finished, leased and trained group of two rollouts, closed on disk."""

    folder: StoreFolder
    rollouts: list[str] = field(default_factory=list)


def make_store(path: Path) -> SampleStore:
    """A store as a gateway leaves it after one trained group."""
    folder = StoreFolder.create(path, "run1", 1)
    folder.keep_stop_ids({STOP_ID})
    sample = SampleStore(folder)
    with ControlStore(folder.control, run="run1") as control, TurnStore(folder.turns(0)) as turns:
        for number in range(2):
            rollout = f"rollout-{number}"
            sample.rollouts.append(rollout)
            secret = hashlib.sha256(rollout.encode()).digest()
            new = wire.NewRollout(task="count", group="group-0", group_size=2, harness="pi")
            control.create_rollout(rollout, secret, new, "policy", 0, number)
            turns.commit(make_rollout_turns(rollout))
            result = wire.FinishRollout(reward=float(number))
            control.finish_rollout(rollout, result, 10 + number, seal=turns.seal(rollout))
        grant = control.lease(wire.NewLease(policy="policy"), 20)
        for rollout in sample.rollouts:
            control.record_served(build_rows(turns.turns(rollout)))
        told = wire.GroupAck(group="group-0", fate="trained")
        control.ack(grant.id, wire.AckLease(epoch=grant.epoch, step=1, groups=[told]), 30)
    return sample
