"""All templates, in the order of the documentation's table."""

from __future__ import annotations

from turngate.tasks.dataops import code, configs, files, lines_of_text, logs, records, refactors, tables
from turngate.tasks.dataops.template import Template

FAMILIES = (lines_of_text, files, configs, tables, logs, records, code, refactors)
TEMPLATES: tuple[Template, ...] = tuple(
    sorted((one for family in FAMILIES for one in family.TEMPLATES), key=lambda one: (one.held_out, one.level))
)
