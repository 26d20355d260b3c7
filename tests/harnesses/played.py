"""Tasks of the dataops set that agents play in tests: every level, and every tool of a solution."""

from __future__ import annotations

PLAYED = (
    "count-lines-01",
    "write-file-02",
    "replace-word-02",
    "csv-join-01",
    "extract-pattern-03",
    "json-report-04",
    "fix-function-11",
    "name-constant-01",
    "move-function-02",
)
