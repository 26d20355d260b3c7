"""The scenarios: what the scripted model says to each agent, on which prompts, before which engine.

What must come of it stands in expected.toml, by hand. A scenario that an agent has no part in is not written for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bench.matrix.prompts import Conversation
from bench.matrix.vocabulary import Words
from tests.fake_engine.settings import FakeSettings, Fault

CUT = "word " * 100
CUT_TOKENS = 70
TOLD_CUT = "reached the output token limit"


@dataclass(frozen=True)
class Scenario:
    """One way to talk to an agent.

    `check` is what the workspace must pass, a shell condition. `options`, `sampling` and `history` are those of the
    run; `tweak` changes the agent's own configuration files (path -> patch of its JSON) where no option does.
    """

    talk: tuple[Conversation, ...]
    prompts: tuple[str, ...] = ("Do it.",)
    check: str = "true"
    options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    history: Literal["template", "append"] = "template"
    template: str = "qwen"
    engine: FakeSettings = field(default_factory=FakeSettings)
    fault: Fault | None = None
    gateway: tuple[str, ...] = ()
    tweak: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


Build = Callable[[str, Words], Scenario | None]


def main(*answers: Any, **where: Any) -> Conversation:
    """The main conversation."""
    return Conversation("main", answers, **where)


def odd_json(name: str, words: Words) -> Scenario:
    """Six turns whose arguments are JSON as no library writes it."""
    spaced = words.odd('{$NUMBER$MORE "$KEY" :  "echo h\\u00e9llo > a.txt" }')
    twice = words.odd('{"$KEY"\n:"exit 3" ,$MORE"$KEY":"echo \\"{\\\\\\"x\\\\\\": 1.50}\\" > b.txt"}')
    escaped = words.odd('{$MORE"$KEY":"echo \\ud83d\\ude00 \\/ > c.txt   \\n"}')
    numbers = words.odd('{$MORE"$KEY":"\\u0065cho 12345678901234567890 1e3 > d.txt"}')
    talk = main(
        {"content": "  Let me look.\n\n", "tool_calls": [spaced]},
        {"tool_calls": [twice]},
        {"content": "日本語 🎉:\t", "tool_calls": [escaped]},
        {"content": "", "tool_calls": [numbers]},
        words.run("printf '</b>\\u2028' | wc -c"),
        words.last("  Done: the file says héllo 😀 世界. \n"),
    )
    check = "grep -qx héllo a.txt && grep -q '😀 /' c.txt && grep -q '67890 1e3' d.txt"
    if name != "codex":  # it refuses a key that stands there twice
        check += " && grep -q 1.50 b.txt"
    return Scenario((talk,), check=check)


def parallel(name: str, words: Words) -> Scenario:
    """Three calls in one turn, the first the slowest; then two that are the same."""
    slow = [words.call("sleep 0.5; echo 1 > 1.txt"), words.call("echo 2 > 2.txt"), words.call("echo 3 > 3.txt")]
    same = [words.call("echo x >> x.txt"), words.call("echo x >> x.txt")]
    talk = main({"content": "All.", "tool_calls": slow}, {"tool_calls": same}, words.last("Done."))
    return Scenario((talk,), check="cat 1.txt 2.txt 3.txt x.txt")


def reasoning(name: str, words: Words) -> Scenario:
    """Thoughts before calls and before texts, with a template that renders those since the last user message only."""
    talk = main(
        words.run("echo 1 > 1.txt", reasoning="First this.\n", content="So:"),
        words.run("echo 2 > 2.txt", reasoning=" Then that. "),
        words.last("Done.", reasoning="Now I am done."),
        words.last("Still done.", reasoning="Nothing to do."),
    )
    prompts = ("Do it.",) if words.submits else ("Do it.", "Again.")
    return Scenario((talk,), prompts, check="cat 1.txt 2.txt", template="drop-reasoning")


def unknown_tool(name: str, words: Words) -> Scenario:
    """A call of a tool that is not offered."""
    bad = {"content": "Hm.", "tool_calls": [{"name": "nonsense", "arguments": '{"x": 1.50}'}]}
    return _bad_answer(words, bad, "Unknown tool")


def broken_json(name: str, words: Words) -> Scenario:
    """A call whose arguments end in the middle."""
    bad = {"content": "Hm.", "tool_calls": [words.odd('{"$KEY": "ls", "descr')]}
    return _bad_answer(words, bad, "Error parsing tool call arguments")


def _bad_answer(words: Words, bad: Any, note: str) -> Scenario:
    """A bad answer, a good one, the last one; an agent that drops the bad one says so in a note instead."""
    good, last = words.run("echo 1 > 1.txt"), words.last("Done.")
    if words.submits:
        return Scenario((main(good, tail=note), main(bad, last)), check="cat 1.txt")
    return Scenario((main(bad, good, last),), check="cat 1.txt")


def empty(name: str, words: Words) -> Scenario:
    """An answer of nothing, between two that say something."""
    go_on = main(words.last("Done."), tail=EMPTY_NOTES.get(name, "Again."))
    prompts = ("Do it.",) if words.submits else ("Do it.", "Again.")
    return Scenario((go_on, main(words.run("echo 1 > 1.txt"), "")), prompts, check="cat 1.txt")


EMPTY_NOTES = {"mini-swe-agent": "No tool calls found"}


def length(name: str, words: Words) -> Scenario:
    """A text cut by the token limit, then a short one."""
    prompts = ("Do it.",) if words.submits else ("Do it.", "Again.")
    note = TOLD_CUT if words.submits else "Again."
    talk = (main(words.last("Fine."), tail=note), main(CUT))
    return Scenario(talk, prompts, sampling={"max_tokens": CUT_TOKENS})


def length_in_call(name: str, words: Words) -> Scenario:
    """A tool call cut by the token limit in the middle of its arguments."""
    cut, last = words.run("echo " + CUT), words.last("Fine.")
    talk = (main(last, tail=TOLD_CUT), main(cut)) if words.submits else (main(cut, last),)
    return Scenario(talk, sampling={"max_tokens": CUT_TOKENS})


def fault(name: str, words: Words) -> Scenario:
    """The engine breaks off twice in the middle of answers."""
    talk = main(words.run("echo 1 > 1.txt", content="I write a file, as I was told."), words.last("Done, it is there."))
    return Scenario((talk,), check="cat 1.txt", fault=Fault("drop", after_tokens=4, times=2))


def fault_error(name: str, words: Words) -> Scenario:
    """The engine ends a stream by an error and then, as if all were well, by its end mark."""
    talk = main(words.run("echo 1 > 1.txt", content="I write a file, as I was told."), words.last("Done, it is there."))
    return Scenario((talk,), check="cat 1.txt", fault=Fault("error", after_tokens=4, times=2))


def slow(name: str, words: Words) -> Scenario:
    """An engine that is silent for seconds and then says a few tokens a second."""
    talk = main(words.run("echo 1 > 1.txt"), words.last("Done."))
    engine = FakeSettings(latency_first_s=4.0, tokens_per_s=20.0, intervals=False)
    return Scenario((talk,), check="cat 1.txt", engine=engine, gateway=("--keepalive-s", "0.5"))


def subagents(name: str, words: Words) -> Scenario:
    """Agents below the agent; in parallel, where it does not go on without waiting for them."""
    if name == "codex":
        child = Conversation("subagent", (words.run("echo 1 > 1.txt"), "1 is done"), head="CHILD1 looks")
        wait = words.run("until test -e 1.txt; do sleep 0.2; done; sleep 5")
        return Scenario(
            (child, main({"tool_calls": [words.begin("CHILD1 looks")]}, wait, words.last("Done."))), check="cat 1.txt"
        )
    children = [
        Conversation(
            "subagent", (words.run(f"echo {n} > {n}.txt"), words.report(f"{n} is done")), head=f"CHILD{n} looks"
        )
        for n in (1, 2)
    ]
    split = {"content": "Split.", "tool_calls": [words.begin(f"CHILD{n} looks") for n in (1, 2)]}
    return Scenario((*children, main(split, words.last("Done."))), check="cat 1.txt 2.txt")


COUNTED = "They counted to 1200, all is well, and nothing is left to do but to say so."


def compaction(name: str, words: Words) -> Scenario:
    """A history that outgrows the context, or is told to be summed up, and what comes after it."""
    after = main(words.last("Went on."), head=COUNTED)
    count = words.run("seq 1 1200")
    match name:
        case "opencode":
            ask = Conversation("compaction", (COUNTED,), head="context summarization agent")
            work = main(words.run("seq 1 700"), words.run("echo hi"), words.run("echo ho"), words.last("Went on."))
            return Scenario((ask, work), options={"context_tokens": 9000, "compaction": True})
        case "codex":
            ask = Conversation("compaction", (COUNTED,), tail="CONTEXT CHECKPOINT COMPACTION")
            work = main(count, words.run("echo hi"))
            return Scenario((ask, after, work), options={"context_tokens": 9000, "compaction": True})
        case "claude-code":
            told = f"<analysis>Numbers.</analysis>\n<summary>{COUNTED}</summary>"
            ask = Conversation("compaction", (told,), tail="Respond with TEXT ONLY")
            work = main(words.run("echo hi"), words.last("Done."))
            return Scenario((ask, after, work), ("Do it.", "/compact", "Go on."), options={"compaction": True})
        case "gemini-cli":
            told = f"<scratchpad>Numbers.</scratchpad>\n<state_snapshot>{COUNTED}</state_snapshot>"
            ask = Conversation("compaction", (told,), head="distilling chat history")
            work = main(count, words.last("Done."))
            patch = {".gemini/settings.json": {"model": {"compressionThreshold": 0.001}}}
            return Scenario((ask, after, work), ("Do it.", "Go on."), options={"compaction": True}, tweak=patch)
        case _:
            ask = Conversation("compaction", (COUNTED,), head="context summarization assistant")
            limits = {"enabled": True, "reserveTokens": 3000, "keepRecentTokens": 500}
            work = main(words.run("echo hi", content="First I say hello to all."), count)
            patch = {".pi/agent/settings.json": {"compaction": limits}}
            return Scenario((ask, after, work), options={"context_tokens": 9000}, tweak=patch)


def side(name: str, words: Words) -> Scenario:
    """Calls beside the work: a title, or who is to speak next."""
    work = main(words.run("echo 1 > 1.txt"), words.last("Done."))
    if name == "gemini-cli":
        verdict = '{"reasoning": "It is done.", "next_speaker": "user"}'
        ask = Conversation("side", (verdict,), tail="determine who should logically speak next")
        patch = {".gemini/settings.json": {"model": {"skipNextSpeakerCheck": False}}}
        return Scenario((ask, work), ("Do it.", "Again."), check="cat 1.txt", tweak=patch)
    ask = Conversation("side", ("A title",), head="title generator")
    return Scenario((ask, work), check="cat 1.txt", options={"side_calls": True})


def everything(name: str, words: Words) -> Scenario:
    """An agent below whose history outgrows its context, one above that does so too or is told to, and a title."""
    child_says = (words.run("seq 1 1200"), words.run("echo 1 > 1.txt"), "1 is done")
    begun = {"tool_calls": [words.begin("CHILD1 looks")]}
    child = Conversation("subagent", child_says, head="CHILD1 looks")
    if name == "claude-code":
        told = f"<analysis>Numbers.</analysis>\n<summary>{COUNTED}</summary>"
        ask = Conversation("compaction", (told,), tail="Respond with TEXT ONLY")
        after = main(words.run("echo hi"), words.last("Went on."), head=COUNTED)
        prompts = ("Do it.", "/compact", "Go on.", "/compact", "And on.")
        work = main(begun, words.last("Done."))
        return Scenario((ask, child, after, work), prompts, check="cat 1.txt", options={"compaction": True})
    options = {"context_tokens": 9000, "compaction": True}
    title = Conversation("side", ("A title",), head="title generator")
    below = COUNTED.replace("They", "The children")
    count, hi = words.run("seq 1 700"), words.run("echo hi")
    talk = (
        title,
        Conversation("compaction", (COUNTED,), head="context summarization agent", tail="[User]: Do it."),
        Conversation("compaction", (below,), head="context summarization agent"),
        Conversation("subagent", ("-", words.run("echo 1 > 1.txt"), "1 is done"), said=below),
        Conversation("subagent", (count, hi), head="CHILD1 looks"),
        main("-", words.last("Went on."), said=COUNTED),
        main(begun, count, hi),
    )
    return Scenario(talk, check="cat 1.txt", options={**options, "side_calls": True})


def correction(name: str, words: Words) -> Scenario:
    """Gemini CLI asks a model to mend an edit whose old text is not there."""
    edit = {"file_path": "a.txt", "instruction": "Count on.", "old_string": "uno dos", "new_string": "one two three"}
    mended = {"search": "one two", "replace": "one two three", "noChangesRequired": False, "explanation": "Spaces."}
    ask = Conversation("side", (json.dumps(mended),), head="expert code-editing assistant")
    call = {"content": "Now I change it.", "tool_calls": [{"name": "replace", "arguments": edit}]}
    work = main(words.run("echo one two > a.txt"), words.run("cat a.txt"), call, words.last("Done."))
    patch = {".gemini/settings.json": {"tools": {"disableLLMCorrection": False}}}
    return Scenario((ask, work), check="grep -x 'one two three' a.txt", tweak=patch)


def loop_check(name: str, words: Words) -> Scenario:
    """Gemini CLI asks a model after thirty turns whether it goes round in circles."""
    verdict = {"unproductive_state_analysis": "It counts.", "unproductive_state_confidence": 0.1}
    ask = Conversation("side", (json.dumps(verdict),), head="diagnostic agent")
    work = main(*(words.run(f"echo {n} > {n}.txt") for n in range(32)), words.last("Done."))
    patch = {".gemini/settings.json": {"model": {"disableLoopDetection": False}}}
    return Scenario((ask, work), check="cat 0.txt 31.txt", tweak=patch)


SCENARIOS: dict[str, Build] = {
    "odd-json": odd_json,
    "parallel": parallel,
    "reasoning": reasoning,
    "unknown-tool": unknown_tool,
    "broken-json": broken_json,
    "empty": empty,
    "length": length,
    "length-in-call": length_in_call,
    "fault": fault,
    "fault-error": fault_error,
    "slow": slow,
    "subagents": subagents,
    "compaction": compaction,
    "side": side,
    "everything": everything,
    "correction": correction,
    "loop-check": loop_check,
}
