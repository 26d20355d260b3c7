"""Template contexts of one rollout's pages: conversation, rows, one turn.

They join the list's facts with the rollout's turns; large prompts are cut here so that no page grows without bound.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from turngate.proxy.rows import build_rows
from turngate.proxy.turns import Turn, by_id, prompt_ids
from turngate.proxy.viewer import charts, pages, tokens
from turngate.proxy.viewer.index import Index, advantages
from turngate.proxy.viewer.messages import pretty
from turngate.proxy.viewer.reader import StoreReader
from turngate.proxy.viewer.text import TokenText
from turngate.proxy.wire import RolloutInfo

BASE_TOKENS_SHOWN = 160
TAIL_TOKENS_SHOWN = 4000
COMPLETION_TOKENS_SHOWN = 4000
CONTEXT_TOKENS_SHOWN = 24


def rollout_context(index: Index, reader: StoreReader, rollout: str) -> dict[str, Any] | None:
    """The rollout's page; None when there is no such rollout."""
    info = index.by_id.get(rollout)
    if info is None:
        return None
    turns = reader.turns(rollout)
    return _shared(index, info) | {"steps": pages.steps(turns), "metadata": pretty(info.metadata)}


def rows_context(
    index: Index, reader: StoreReader, text: TokenText, rollout: str, *, whole: bool
) -> dict[str, Any] | None:
    """Rows and their loss masks; `broken` says why there are none."""
    info = index.by_id.get(rollout)
    if info is None:
        return None
    turns = reader.turns(rollout)
    seqs = {turn.id: turn.seq for turn in turns}
    try:
        rows, broken = build_rows(turns, info.trained_labels), ""
    except (ValueError, KeyError) as error:
        rows, broken = [], f"The turn tree is broken: {error}"
    shown = [
        {
            "turns": [seqs[turn] for turn in row.turns],
            "tokens": len(row.ids),
            "trained": int(row.mask.sum()),
            "versions": sorted({int(v) for v in np.unique(row.versions[row.mask])}),
            "stretches": tokens.row_stretches(text, row, keep=len(row.ids) if whole else CONTEXT_TOKENS_SHOWN),
        }
        for row in rows
    ]
    return _shared(index, info) | {"rows": shown, "broken": broken, "text_known": text.known}


def turn_context(
    index: Index, reader: StoreReader, text: TokenText, rollout: str, seq: int, *, whole: bool
) -> dict[str, Any] | None:
    """One turn's page; None when there is no such turn."""
    info = index.by_id.get(rollout)
    turns = reader.turns(rollout) if info is not None else []
    cards = pages.cards(turns)
    card = next((card for card in cards if card.seq == seq), None)
    if info is None or card is None:
        return None
    turn = card.turn
    completion = tokens.completion_chips(text, turn, None if whole else COMPLETION_TOKENS_SHOWN)
    logprobs = [] if turn.mode == "demonstration" else turn.logprobs.tolist()
    return _shared(index, info) | {
        "card": card,
        "turn": turn,
        "cards": cards,
        "step": next(step for step in pages.steps(turns) if step.card.seq == seq),
        "base_seq": next((other.seq for other in turns if other.id == turn.base), None),
        "prompt": _prompt(turns, turn, text, whole),
        "completion": completion,
        "completion_hidden": len(turn.completion_ids) - len(completion),
        "bars": charts.surprise_bars(logprobs, [tokens.surprise_bucket(value) for value in logprobs]),
        "logprob_stats": _stats(logprobs),
        "sampling": pages.sampling(turn),
        "record": pretty(pages.record(turn)),
        "request_json": pretty(dict(turn.request)),
        "response_json": pretty(dict(turn.response)),
        "text_known": text.known,
    }


def _shared(index: Index, info: RolloutInfo) -> dict[str, Any]:
    members = list(index.groups.get(info.group, ())) if info.group is not None else []
    places = [member.id for member in members]
    place = places.index(info.id) if info.id in places else -1
    return {
        "info": info,
        "siblings": members,
        "advantage": advantages(members).get(info.id),
        "earlier": members[place - 1] if place > 0 else None,
        "later": members[place + 1] if 0 <= place < len(members) - 1 else None,
    }


def _prompt(turns: Any, turn: Turn, text: TokenText, whole: bool) -> dict[str, Any]:
    try:
        ids = prompt_ids(by_id(turns), turn)
    except ValueError as error:
        return {"base": [], "tail": [], "base_hidden": turn.base_tokens, "tail_hidden": 0, "broken": str(error)}
    base_hidden = 0 if whole else max(0, turn.base_tokens - BASE_TOKENS_SHOWN)
    tail_hidden = 0 if whole else max(0, len(turn.tail_ids) - TAIL_TOKENS_SHOWN)
    start = turn.base_tokens + tail_hidden
    return {
        "base": tokens.prompt_chips(text, ids[base_hidden : turn.base_tokens], base_hidden),
        "tail": tokens.prompt_chips(text, ids[start:], start),
        "base_hidden": base_hidden,
        "tail_hidden": tail_hidden,
        "broken": "",
    }


def _stats(logprobs: list[float]) -> dict[str, float] | None:
    if not logprobs:
        return None
    values = np.array(logprobs)
    mean = float(values.mean())
    return {"mean": mean, "perplexity": float(np.exp(-mean)), "lowest": float(values.min()), "sum": float(values.sum())}
