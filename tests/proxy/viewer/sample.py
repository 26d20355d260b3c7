"""A realistic run made from a seed: groups, tool calls, reasoning, breaks, subagents, unicode, several versions.

Prompts and completions are real encodings by a small byte-level tokenizer trained on the run's own words, so pages
show true token text, characters split over tokens included.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from turngate.proxy.ids import Uuid7
from turngate.proxy.turns import FloatArray, Span, Timings, Turn, by_id, path_ids
from turngate.proxy.viewer.reader import MemoryReader
from turngate.proxy.wire import AdapterInfo, RolloutInfo

START_NS = 1_790_000_000_000_000_000
HOSTILE = '<script>alert("turn")</script><img src=x onerror=alert(1)>'
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SYSTEM = """You are a careful coding agent working in a sandbox.
Use the bash tool for everything you need to see. Prefer small steps.

Rules:
- Read before you write.
- Never delete what you did not make.
- When the task is done, answer with one short sentence.

Environment: Linux, Python 3.11, no network. The working directory is /workspace.
The following tools are available: bash(command: string, timeout_s: number).
Output longer than 8,000 characters is cut in the middle.
Answer in the language of the task.
Be brief: the reader is busy.
Think before you act, but not for long."""
TASKS = [
    ("shell/count-lines", "How many lines do the .log files under /workspace/logs have in total? Write it to out.txt."),
    ("shell/rename-photos", "Rename every photo in ./photos to its date, keep the extension. 写真は12枚あります。"),
    ("python/fix-csv", "The script convert.py drops the last row of data.csv. Find out why and fix it."),
    ("python/unicode-names", "Normalise the names in people.json (é, ü, ñ, 🦀) to NFC and sort them."),
    ("text/three-words", "Answer with exactly three words that describe the sea."),
    ("git/undo-commit", "The last commit contains a secret. Remove it from the history, keep the other change."),
]
THOUGHTS = [
    "The user wants a count. I should look at the folder first, then use wc. There may be nested folders, so find is "
    "safer than a glob.",
    "The traceback says the index is out of range; range(len(rows) - 1) skips the last row. That is the bug.",
    "I have to be careful with unicode: é may be one code point or two. unicodedata.normalize('NFC', …) handles both.",
    "Let me check the result before I answer.",
]
COMMANDS = [
    "ls -la /workspace && head -5 README.md",
    "find . -name '*.log' -print0 | xargs -0 cat | wc -l",
    "python - <<'EOF'\nimport json\nnames = json.load(open('people.json'))\nprint(sorted(names)[:3])\nEOF",
    "git log --oneline -5; git status --short",
    "sed -n 1,40p convert.py",
    "mv photos/IMG_0042.jpg 'photos/2024-06-01 été 🌊.jpg'",
]
RESULTS = [
    "total 24\ndrwxr-xr-x 4 agent agent 4096 logs\n-rw-r--r-- 1 agent agent  512 README.md\n",
    "1284\n",
    "['Ágnes', 'Błażej', '田中 🦀']\n",
    "\n".join(f"{n:5d}  row {n}: value={n * 37 % 101}" for n in range(40)),
    'Traceback (most recent call last):\n  File "convert.py", line 12\nIndexError: list index out of range\n',
    f"index.html:1:{HOSTILE}\n",
]
ANSWERS = [
    "Done: the total is **1284** lines, written to out.txt.",
    "Vast, restless, blue.",
    "The loop stopped one row early. Fixed:\n\n```python\nfor row in rows:\n    writer.writerow(row)\n```\n\n"
    "The last row is kept now.",
    "名前を並べ替えました。全部で12件です。🦀👩‍💻",
    f"I found this line and left it as it is: {HOSTILE}",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
FAULTS = ["sandbox: start-up took longer than 60 s", "harness: exit status 3", "verifier: reward.txt is missing"]


@dataclass(frozen=True)
class Sample:
    """The values of a made-up run."""

    rollouts: list[RolloutInfo]
    turns: dict[str, list[Turn]]
    adapters: list[AdapterInfo]
    tokenizer: Tokenizer

    def reader(self, folder: Path) -> MemoryReader:
        """A reader over it; the tokenizer is written to `folder`."""
        file = folder / "tokenizer.json"
        self.tokenizer.save(str(file))
        return MemoryReader("sample-run", self.rollouts, self.turns, self.adapters, file)


@cache
def sample_tokenizer() -> Tokenizer:
    """A byte-level BPE of about 900 tokens with chat markers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = [SYSTEM, *(text for _, text in TASKS), *THOUGHTS, *COMMANDS, *(r for r in RESULTS if HOSTILE not in r)]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def make_sample(rollouts: int = 300, *, group_size: int = 6, seed: int = 7) -> Sample:
    """A run of `rollouts` attempts, `group_size` a group; the same seed gives the same run."""
    draw = random.Random(seed)
    versions = 6
    adapters = [_adapter(n, START_NS + n * rollouts * 150_000_000) for n in range(1, versions)]
    infos: list[RolloutInfo] = []
    turns: dict[str, list[Turn]] = {}
    for number in range(rollouts):
        at_ns = START_NS + number * 900_000_000
        rollout = Uuid7().make(at_ns, draw.randbytes(10))
        version = min(versions - 1, number * versions // rollouts)
        group, place = divmod(number, group_size)
        task, instruction = TASKS[group % len(TASKS)]
        made = _Attempt(draw, rollout, version, at_ns).play(instruction)
        turns[rollout] = made
        infos.append(_info(draw, rollout, task, f"{task}#{group}", version, at_ns, made, number >= rollouts - 4, place))
    return Sample(infos, turns, adapters, sample_tokenizer())


class _Attempt:
    """Plays one rollout turn by turn."""

    def __init__(self, draw: random.Random, rollout: str, version: int, at_ns: int) -> None:
        self.draw, self.rollout, self.version, self.at_ns = draw, rollout, version, at_ns
        self.turns: list[Turn] = []
        self.clock_ns = at_ns

    def play(self, instruction: str) -> list[Turn]:
        """Title turn sometimes, then tool steps with breaks and subagents now and then, then the answer."""
        if self.draw.random() < 0.3:
            self._turn("first", None, [_user(f"Write a title for: {instruction}")], _says("Log counting"), label="side")
        opening = [{"role": "system", "content": SYSTEM}, _user(instruction)]
        last = self._turn("first", None, opening, self._call())
        for _ in range(self.draw.randrange(0, 6)):
            reply = self._result(last)
            luck = self.draw.random()
            if luck < 0.06:
                last = self._broken(last, opening, "history rewritten", "main")
            elif luck < 0.1:
                last = self._broken(last, opening, "compaction", "compaction")
            elif luck < 0.15:
                sub = [{"role": "system", "content": "You are a subagent: search only."}, _user("Find the bug.")]
                self._turn("first", None, sub, _says("convert.py line 12"), label="subagent")
            else:
                last = self._turn("spliced", last, reply, self._call())
        if self.draw.random() < 0.93:
            self._turn("spliced", last, self._result(last), _says(self.draw.choice(ANSWERS), self._thought()))
        return self.turns

    def _thought(self) -> str | None:
        return self.draw.choice(THOUGHTS) if self.draw.random() < 0.6 else None

    def _call(self) -> dict[str, Any]:
        arguments = json.dumps({"command": self.draw.choice(COMMANDS), "timeout_s": 30}, ensure_ascii=False)
        if self.draw.random() < 0.2:
            arguments = arguments.replace('": ', '" :  ', 1)
        if self.draw.random() < 0.04:
            arguments = arguments[:-9]
        call_id = f"call{self.draw.getrandbits(40):010x}"
        call = {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments}}
        said = _says(self.draw.choice(["", "Let me look.", "Now the fix."]), self._thought())
        return said | {"tool_calls": [call]}

    def _result(self, last: Turn) -> list[dict[str, Any]]:
        calls = last.response.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": c["id"], "content": self.draw.choice(RESULTS)} for c in calls]
        return results or [_user("Please go on.")]

    def _broken(self, last: Turn, opening: list[dict[str, Any]], cause: str, label: str) -> Turn:
        kept = [*opening, _user("Summary so far: the logs were counted; the answer is still to be written.")]
        return self._turn("break", last, kept, self._call(), label=label, cause=cause)

    def _turn(
        self,
        kind: str,
        base: Turn | None,
        new: list[dict[str, Any]],
        response: dict[str, Any],
        *,
        label: str = "main",
        cause: str | None = None,
    ) -> Turn:
        # A source of its own, so that the run's shape does not hang on how the tokenizer split a text.
        draw, tokenizer = random.Random(self.draw.getrandbits(64)), sample_tokenizer()
        known = by_id(self.turns)
        prompt = tokenizer.encode("".join(_chat(m) for m in new) + "<|im_start|>assistant\n").ids
        base_tokens = 0
        if base is not None and kind == "spliced":
            base_tokens = base.path_tokens
            prompt = tokenizer.encode("\n").ids + prompt
        elif base is not None:
            whole = path_ids(known, base).tolist()
            while base_tokens < min(len(whole), len(prompt)) and whole[base_tokens] == prompt[base_tokens]:
                base_tokens += 1
            prompt = prompt[base_tokens:]
        cut = draw.random() < 0.03
        completion = tokenizer.encode(_body(response) + ("" if cut else "<|im_end|>")).ids
        logprobs, top_ids, top_logprobs = _distribution(draw, completion)
        received_ns = self.clock_ns - START_NS + 5_000_000_000
        dispatched_ns = received_ns + draw.randrange(2, 30) * 1_000_000
        first_ns = dispatched_ns + draw.randrange(40, 700) * 1_000_000
        done_ns = first_ns + len(completion) * draw.randrange(6, 20) * 1_000_000
        turn = Turn(
            id=Uuid7().make(self.clock_ns, draw.randbytes(10)),
            rollout=self.rollout,
            seq=len(self.turns),
            kind=kind,  # type: ignore[arg-type]
            base=base.id if base is not None else None,
            base_tokens=base_tokens,
            break_cause=cause,
            tail_ids=np.array(prompt, dtype=np.int32),
            completion_ids=np.array(completion, dtype=np.int32),
            logprobs=logprobs,
            spans=_spans(draw, len(completion), self.version),
            finish_reason="length" if cut else ("tool_calls" if response.get("tool_calls") else "stop"),
            stop_reason=None,
            timings=Timings(self.clock_ns, received_ns, dispatched_ns, first_ns, done_ns),
            label=label,  # type: ignore[arg-type]
            label_reason={"side": "short title prompt", "main": "default"}.get(label, "other system prompt"),
            engine="replica-0",
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            sampling_asked={"temperature": 0.2, "max_tokens": 4096, "logprobs": False},
            sampling_used={"temperature": 1.0, "top_p": 1.0, "max_tokens": 1024, "logprobs": 4, "seed": 11},
            request={"messages": new, "tools": TOOLS if label == "main" else None, "params": {"stream": True}},
            response=response,
            flags=("special_in_text",) if draw.random() < 0.02 else (),
        )
        self.turns.append(turn)
        self.clock_ns += done_ns - received_ns + draw.randrange(30, 900) * 1_000_000
        return turn


def _distribution(draw: random.Random, ids: Sequence[int]) -> tuple[FloatArray, Any, Any]:
    """Log-probs of mostly sure tokens, and four alternatives each of which one is the sampled token."""
    probabilities = np.array([draw.betavariate(5, 0.6) for _ in ids])
    rare = np.array([draw.random() < 0.05 for _ in ids], dtype=bool)
    probabilities = np.clip(np.where(rare, probabilities * 0.01, probabilities), 1e-5, 0.9999)
    top_ids = np.zeros((len(ids), 4), dtype=np.int32)
    top = np.zeros((len(ids), 4), dtype=np.float16)
    for place, number in enumerate(ids):
        rest = 1.0 - probabilities[place]
        options = [(float(probabilities[place]), number)]
        options += [(rest * share, draw.randrange(3, 900)) for share in (0.6, 0.25, 0.1)]
        options.sort(reverse=True)
        top_ids[place] = [number for _, number in options]
        top[place] = np.log([max(p, 1e-7) for p, _ in options])
    return np.log(probabilities).astype(np.float32), top_ids, top


def _spans(draw: random.Random, length: int, version: int) -> tuple[Span, ...]:
    def span(start: int, end: int, number: int) -> Span:
        return Span(start, end, "demo", number, f"demo-sample-v{number}" if number else None)

    if version and length > 20 and draw.random() < 0.05:
        return (span(0, length // 2, version - 1), span(length // 2, length, version))
    return (span(0, length, version),)


def _info(
    draw: random.Random,
    rollout: str,
    task: str,
    group: str,
    version: int,
    at_ns: int,
    turns: list[Turn],
    is_open: bool,
    place: int,
) -> RolloutInfo:
    fault = draw.random() < 0.06
    easy = 0.15 + 0.12 * version + 0.1 * (len(task) % 3)
    reward = None if fault or is_open else (1.0 if draw.random() < easy else draw.choice([0.0, 0.0, 0.25, 0.5]))
    last = turns[-1].timings
    return RolloutInfo(
        id=rollout,
        task=task,
        group=group,
        harness="pi" if place % 3 else "opencode",
        policy="demo",
        version=version,
        state="open" if is_open else "finished",
        outcome=None if is_open else ("unscorable" if fault else "scored"),
        cause=draw.choice(FAULTS) if fault and not is_open else None,
        reward=reward,
        rewards={} if reward is None else {"format": 1.0, "answer": reward},
        metrics={"exit_status": 0, "tool_calls": len(turns) - 1},
        metadata={"sandbox": "bubblewrap", "seed": place},
        created_at_ns=at_ns,
        finished_at_ns=None if is_open else last.received_at_ns + last.done_ns - last.received_ns + 400_000_000,
        turns=len(turns),
        breaks=sum(turn.kind == "break" for turn in turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        completion_tokens=sum(len(turn.completion_ids) for turn in turns),
    )


def _adapter(version: int, at_ns: int) -> AdapterInfo:
    return AdapterInfo(
        policy="demo",
        version=version,
        name=f"demo-sample-v{version}",
        path=f"adapters/v{version}",
        step=version * 2,
        state="live" if version >= 4 else "retired",
        cause=None,
        published_at_ns=at_ns,
        sessions=2 if version == 5 else 0,
    )


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _says(text: str, reasoning: str | None = None) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": text}
    return said | {"reasoning": reasoning} if reasoning else said


def _chat(message: Mapping[str, Any]) -> str:
    return f"<|im_start|>{message['role']}\n{_body(message)}<|im_end|>\n"


def _body(message: Mapping[str, Any]) -> str:
    thought = f"<think>\n{message['reasoning']}\n</think>\n\n" if message.get("reasoning") else ""
    calls = "".join(
        f'\n<tool_call>\n{{"name": "bash", "arguments": {c["function"]["arguments"]}}}\n</tool_call>'
        for c in message.get("tool_calls", ())
    )
    return f"{thought}{message['content']}{calls}"


def many_rollouts(sample: Sample, count: int) -> MemoryReader:
    """`count` rollouts that share one turn list, to see how lists behave when there are many."""
    base = sample.rollouts[:-4]
    infos = [
        base[n % len(base)].model_copy(update={"id": f"{n:08d}", "created_at_ns": START_NS + n}) for n in range(count)
    ]
    some = next(iter(sample.turns.values()))
    turns = {info.id: [replace(turn, rollout=info.id) for turn in some[:1]] for info in infos}
    return MemoryReader("many", infos, turns, sample.adapters)
