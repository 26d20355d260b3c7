"""The verifier program on what an agent may leave: whatever it is, the answer is a number from 0 to 1."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngate.tasks.dataops import template
from turngate.tasks.dataops.check import alike, grade

PATH = "left.txt"
CHECKS: list[template.Check] = [
    template.number(PATH, 12),
    template.lines(PATH, ["a", "b"]),
    template.table(PATH, [["id", "n"], ["1", "2.5"]]),
    template.pairs(PATH, {"a": 1, "b": 2, "c": "x"}),
    template.settings(PATH, "env", {"A": "1"}),
    template.settings(PATH, "ini", {"s": {"a": "1"}}),
    template.settings(PATH, "json", {"a": [1, {"b": None}]}),
    template.same(PATH, "a\n"),
    {"kind": "program", "path": PATH, "source": "a = 1\n"},
    {"kind": "defines", "path": PATH, "present": ["f"], "missing": ["g"]},
]
"""Every kind that reads a file and starts no process."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
PIECES = st.sampled_from(
    ["=", ",", "\n", "\0", '"', "[s]\n", "a", "1", "-", "1e999", "9" * 5000, "def f():", "(", "é", "\ud7ff"]
)
LEFT = st.text() | JSON.map(lambda value: json.dumps(value)) | st.lists(PIECES, max_size=30).map("".join)


@settings(max_examples=300, deadline=None)
@given(LEFT.map(lambda text: text.encode("utf-8", "surrogatepass")) | st.binary())
def test_whatever_a_file_holds_it_is_graded(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PATH).write_bytes(data)
        for check in CHECKS:
            assert 0.0 <= grade(Path(folder), [check]) <= 1.0


@pytest.mark.parametrize(
    "text",
    [
        "-" * 200_000 + "1",
        "[" * 200_000,
        "(" * 5_000,
        '"' + "x" * 300_000 + '"',
        "1" * 4_000,
        "a=" * 90_000,
        "x." * 90_000,
    ],
    ids=["minus", "brackets", "parentheses", "field", "digits", "equals", "dots"],
)
def test_extreme_files_are_wrong_and_no_error(text: str, tmp_path: Path) -> None:
    (tmp_path / PATH).write_text(text)
    assert [grade(tmp_path, [check]) for check in CHECKS] == [0.0] * len(CHECKS)


@given(JSON)
def test_a_value_is_like_itself_unless_it_holds_what_is_not_finite(value: Any) -> None:
    text = json.dumps(value)
    assert alike(value, value) == ("NaN" not in text and "Infinity" not in text) or '"' in text


@pytest.mark.parametrize(
    ("check", "text", "reward"),
    [
        (CHECKS[1], "a  \nb\n\n\n", 1.0),
        (CHECKS[1], "b\na\n", 0.0),
        (CHECKS[2], "id,n\r\n1,2.50\r\n", 1.0),
        (CHECKS[2], '"id","n"\n1,2.5\n', 1.0),
        (CHECKS[3], "a=1\nb=2\nc=x\n", 1.0),
        (CHECKS[3], "a = 1\nb=2.0\n", 2 / 3),
        (CHECKS[3], "a=1\n", 0.0),
        (CHECKS[3], "a=1\nb=2\nc=x\nd=4\n", 0.0),
        (CHECKS[4], "# note\n\nA=1\n", 1.0),
        (CHECKS[4], "A=0\nA=1\n", 0.0),
        (CHECKS[5], "[s]\na = 1\n", 1.0),
        (CHECKS[6], '{"a": [1.0, {"b": null}]}', 1.0),
        (CHECKS[6], '{"a": [true, {"b": null}]}', 0.0),
        (CHECKS[8], "# same\na = (1)\n", 1.0),
        (CHECKS[9], "def f():\n    def g(): ...\n", 0.0),
    ],
)
def test_results_count_and_their_writing_does_not(
    check: template.Check, text: str, reward: float, tmp_path: Path
) -> None:
    (tmp_path / PATH).write_text(text)
    assert grade(tmp_path, [check]) == pytest.approx(reward)


def test_a_gate_that_fails_takes_everything(tmp_path: Path) -> None:
    (tmp_path / PATH).write_text("12\n")
    gone = {"kind": "absent", "path": "other", "gate": True}
    assert grade(tmp_path, [CHECKS[0], gone]) == 1.0
    (tmp_path / "other").symlink_to("nowhere")
    assert grade(tmp_path, [CHECKS[0], gone]) == 0.0


def test_the_example_of_the_documentation_is_a_template(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "tasks.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    space: dict[str, Any] = {}
    exec("from turngate.tasks.dataops.template import *\nfrom turngate.tasks.dataops.vocabulary import *", space)
    exec("from turngate.tasks.steps import Bash, Say, Step\n", space)
    exec(code, space)
    made = space["TEMPLATES"][0].make(Random(0), 1)
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    assert grade(tmp_path, made.checks) == 0.0
    subprocess.run(["bash", "-c", made.steps[0].command], cwd=tmp_path, check=True)
    assert grade(tmp_path, made.checks) == 1.0
