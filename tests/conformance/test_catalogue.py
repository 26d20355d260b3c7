"""Every defect of the list has a test of its name, and no test is without its words."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.defects import DEFECTS

HERE = Path(__file__).parent


def test_each_defect_has_a_test_named_after_it() -> None:
    written = [
        name
        for file in sorted(HERE.glob("test_*.py"))
        if file.name != Path(__file__).name
        for name in re.findall(r"^def test_(\w+)\(", file.read_text(), re.MULTILINE)
    ]
    assert sorted(written) == sorted(DEFECTS)
