"""JSON: a report over a list of records, and lines that are JSON or not."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from turngate.tasks.dataops.template import Draft, Template, lines, pairs, text
from turngate.tasks.dataops.vocabulary import CITIES, NAMES, OUTPUTS, SERVICES, STATES, stem
from turngate.tasks.steps import Bash, Say, Step, Write


def report(random: Random, index: int) -> Draft:
    """Three facts about a list of objects."""
    file, out, script = f"{stem(random)}.json", random.choice(OUTPUTS), "report.py"
    field = random.choice(["score", "age", "balance", "visits"])
    states = random.sample(STATES, 3)
    names = random.sample(NAMES, random.randint(10, 14))
    values = random.sample(range(20, 900), len(names))
    records: list[dict[str, Any]] = [
        {"name": name, "city": random.choice(CITIES), "state": random.choice(states), field: value}
        for name, value in zip(names, values, strict=True)
    ]
    records[0]["state"] = states[0]
    chosen = [record[field] for record in records if record["state"] == states[0]]
    low = index % 2
    extreme = (min if low else max)(records, key=lambda record: int(record[field]))
    wanted = {"total": sum(values), "first": extreme["name"], "part": sum(chosen)}
    size = "smallest" if low else "largest"
    facts = (
        f"`total=` the sum of {field}, `first=` the name with the {size} {field}, `part=` the sum of {field} where "
        f"state is {states[0]}"
    )
    instruction = random.choice(
        [
            f"{file} is a JSON list of objects. Write three lines to {out}: {facts}.",
            f"Read the JSON list in {file} and create {out} with these three lines: {facts}.",
            f"Make {out} from the records in {file}. Its lines: {facts}. Nothing else.",
        ]
    )
    code = [
        "import json",
        f"rows = json.load(open('{file}'))",
        f"total = sum(r['{field}'] for r in rows)",
        f"first = {'min' if low else 'max'}(rows, key=lambda r: r['{field}'])['name']",
        f"part = sum(r['{field}'] for r in rows if r['state'] == '{states[0]}')",
        "print(f'total={total}\\nfirst={first}\\npart={part}')",
    ]
    steps: list[Step] = [
        Bash(command=f"head -c 300 {file}"),
        Write(path=script, content=text(code)),
        Bash(command=f"python3 {script} > {out}"),
        Bash(command=f"cat {out}"),
        Say(text=f"The three lines are in {out}."),
    ]
    listed = ",\n ".join(json.dumps(record) for record in records)
    return Draft(instruction, {file: f"[\n {listed}\n]\n"}, [pairs(out, wanted)], steps)


def split_lines(random: Random, index: int) -> Draft:
    """Valid JSON lines to one file, the rest to another."""
    file, good, bad = f"{random.choice(SERVICES)}.jsonl", "good.jsonl", "bad.txt"
    rows, valid = [], []
    for place in range(random.randint(14, 26)):
        row = json.dumps({"id": random.randint(100, 999), "city": random.choice(CITIES), "ok": random.random() < 0.5})
        broken = place % 4 == 1 or random.random() < 0.15
        if broken:
            row = random.choice([row[:-1], row.replace('"', "'"), row.replace(":", "", 1), f"{row},"])
        rows.append(row)
        valid.append(not broken)
    instruction = random.choice(
        [
            f"Some lines of {file} are not valid JSON. Write the valid lines, unchanged and in order, to {good} and "
            f"the others to {bad}.",
            f"Split {file} by line: those that parse as JSON go to {good}, the broken ones to {bad}. Keep the order.",
            f"Check every line of {file}. Valid JSON belongs into {good}, anything else into {bad}, both in the "
            "original order.",
        ]
    )
    code = [
        "import json",
        f"good, bad = open('{good}', 'w'), open('{bad}', 'w')",
        f"for line in open('{file}'):",
        "    try:",
        "        json.loads(line)",
        "        good.write(line)",
        "    except ValueError:",
        "        bad.write(line)",
    ]
    steps: list[Step] = [
        Bash(command=f"head -n 4 {file}"),
        Write(path="split.py", content=text(code)),
        Bash(command="python3 split.py"),
        Bash(command=f"wc -l {good} {bad}"),
        Say(text=f"Valid lines are in {good}, the others in {bad}."),
    ]
    checks = [
        lines(good, [row for row, fine in zip(rows, valid, strict=True) if fine]),
        lines(bad, [row for row, fine in zip(rows, valid, strict=True) if not fine]),
    ]
    return Draft(instruction, {file: text(rows)}, checks, steps)


TEMPLATES = (
    Template("json-report", 3, "three facts about a JSON list, credit for each once two are right", report),
    Template("json-split", 3, "valid and broken JSON lines into two files", split_lines, held_out=True),
)
