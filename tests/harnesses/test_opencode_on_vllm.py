"""Real OpenCode against the real vLLM: tools and a sub-agent in the sandbox, rows compared with what crossed the wire.

The small model writes no call that can be parsed by itself. So on the way to the engine a grammar is put into each
generation, which leaves words to the model; neither OpenCode nor the gateway knows of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.conftest import FindModel
from tests.engines import RealEngine
from tests.gateway_process import GatewayProcess
from tests.harnesses.conftest import StageMaker, TaskMaker
from tests.harnesses.test_opencode import assert_each_token_is_trained_once, leased_rows, recorded
from tests.tap import GENERATE, Tap, in_this_form, rows_from
from turngate.harnesses.rollout import run_rollout
from turngate.proxy.verify import verify_store

WORD = "[a-z]{3,8}"


def call(name: str, **arguments: str) -> str:
    """A regular expression of one call in the model's own form; `WORD` in an argument is the model's to fill."""
    text = json.dumps({"name": name, "arguments": arguments})
    form = re.escape(text).replace("\\ ", " ").replace(re.escape(WORD), WORD)
    return f"<tool_call>\\n{form}\\n</tool_call>"


LEAD, HELPER = "You lead.", "You help."


def write(file: str) -> str:
    """A call that writes a word into a file. OpenCode's shell would do as well, behind 3,000 more tokens of prompt."""
    return call("write", content=WORD, filePath=file)


DELEGATE = call("task", prompt=f"Say {WORD}", description="say", subagent_type="general")
SAY = f"It is {WORD}\\."
FORMS = {LEAD: [write("lead.txt") + "\\n" + DELEGATE, SAY], HELPER: [write("helper.txt"), SAY]}
CONFIG = {
    "agent": {"build": {"prompt": LEAD}, "general": {"prompt": HELPER}},
    "tools": {"*": False, "write": True, "task": True},
}


class Grammar(Tap):
    """A tap that gives generations whose prompt has a key of `forms` that key's regular expressions, in order."""

    def __init__(self, engine_url: str, tokenizer: Tokenizer, forms: Mapping[str, Sequence[str]]) -> None:
        super().__init__(engine_url)
        self._tokenizer = tokenizer
        self._left = {key: list(of) for key, of in forms.items()}

    def sent(self, path: str, body: bytes) -> bytes:
        """See `Tap`."""
        if path != GENERATE:
            return body
        asked = json.loads(body)
        prompt = self._tokenizer.decode(asked.get("token_ids", []))
        for key, forms in self._left.items():
            if key in prompt and forms:
                asked["sampling_params"]["structured_outputs"] = {"regex": forms.pop(0)}
        return json.dumps(asked).encode()


@pytest.mark.engine
@pytest.mark.harness
async def test_tools_and_a_subagent_run_and_every_row_is_what_the_engine_gave(
    qwen_engine: RealEngine, model_dir: FindModel, make_stage: StageMaker, make_task: TaskMaker, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir("qwen-coder-0.5b") / "tokenizer.json"))
    with Grammar(qwen_engine.url, tokenizer, FORMS) as tap, GatewayProcess(tap.url, tmp_path / "store") as gateway:
        probes = len(tap.generations())
        stage = make_stage(
            gateway,
            harness="opencode",
            group_size=2,
            harness_options={"context_tokens": 8192, "max_answer_tokens": 200, "side_calls": True},
            trained_labels=["main", "subagent"],
            deadline_s=900.0,
        )
        check = f"grep -Exh '{WORD}' lead.txt helper.txt | wc -l >/logs/verifier/reward.txt"
        task = make_task(check, environment={"opencode.json": json.dumps(CONFIG)}, toml="reward_range = [0, 2]")
        result = await run_rollout(stage, task, "group")
        found = recorded(gateway, result)
        leased = leased_rows(gateway, result)
    assert (result.outcome, result.reward) == ("scored", 2.0), result.detail
    assert Counter(turn.label for turn in found) == {"side": 1, "main": 2, "subagent": 2}
    (title,) = (turn for turn in found if turn.label == "side")
    main, helper = ([turn for turn in found if turn.label == label] for label in ("main", "subagent"))
    assert [(turn.kind, len(turn.response.get("tool_calls") or ())) for turn in main] == [
        ("first", 2),
        ("spliced", 0),
    ]
    assert [(turn.kind, turn.parent) for turn in helper] == [("first", main[0].id), ("spliced", main[0].id)]
    assert_each_token_is_trained_once(leased, found, {"main", "subagent"})
    rows = {in_this_form(row.ids, row.mask, row.logprobs) for row in (one.unpack() for one in leased)}
    witnessed = rows_from(tap.generations()[probes:])
    assert rows < witnessed
    ((title_ids, _),) = witnessed - rows
    assert title_ids == (*title.tail_ids.tolist(), *title.completion_ids.tolist())
    report = verify_store(gateway.store)
    assert (report.problems, report.breaks, report.rows, report.exact_rows) == ([], {}, 2, 2)
