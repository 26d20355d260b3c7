"""Logs and running text: count by level and service, find the busiest, extract by pattern."""

from __future__ import annotations

from collections import Counter
from random import Random

from turngate.tasks.dataops.template import Draft, Template, lines, number, text
from turngate.tasks.dataops.vocabulary import (
    GOODS,
    LEVELS,
    NAMES,
    OUTPUTS,
    REMARKS,
    SERVICES,
    sentence,
    stem,
    timestamp,
)
from turngate.tasks.steps import Bash, Read, Say, Step


def count_events(random: Random, index: int) -> Draft:
    """Events of one level and service."""
    file, out = f"{random.choice(SERVICES)}-{random.randint(1, 9)}.log", random.choice(OUTPUTS)
    services, level = random.sample(SERVICES, 3), random.choice(LEVELS[1:])
    clock, rows = 0, []
    for _ in range(random.randint(40, 60)):
        clock += random.randint(1, 400)
        shown = level if random.random() < 0.6 else random.choice(LEVELS)
        rows.append((shown, random.choice(services), timestamp(clock), random.choice(REMARKS)))
    log = [f"{when} {shown} {service}: {remark}" for shown, service, when, remark in rows]
    service = services[0]
    of_level = sum(row[0] == level for row in rows)
    both = sum(row[:2] == (level, service) for row in rows)
    if index % 2:
        what, command, value = f"{level} lines", f"grep -c ' {level} ' {file} > {out}", of_level
    else:
        what, command = f"{level} lines of the service {service}", f"grep -c ' {level} {service}:' {file} > {out}"
        value = both
    example = log[0]
    instruction = random.choice(
        [
            f"Lines of {file} look like `{example}`. Count the {what} and write only the number to {out}.",
            f"How many {what} are in {file}? (A line: `{example}`.) Put just the number into {out}.",
            f"Write the number of {what} in {file} to {out}. The format is `{example}`.",
        ]
    )
    return Draft(instruction, {file: text(log)}, [number(out, value)], [Bash(command=command), Say(text="Done.")])


def busiest(random: Random, index: int) -> Draft:
    """The most frequent address, user or path of an access log, and how often."""
    file, out = (
        f"{random.choice(['access', 'requests', 'web', 'hits'])}{random.randint(1, 9)}.log",
        random.choice(OUTPUTS),
    )
    addresses = [f"10.{random.randint(0, 9)}.{random.randint(0, 99)}.{random.randint(2, 250)}" for _ in range(6)]
    users = [name.lower() for name in random.sample(NAMES, 6)]
    paths = [f"/{good}/{random.randint(1, 99)}" for good in random.sample(GOODS, 6)]
    asked = index % 3
    what, place, values = [("address", 1, addresses), ("user", 2, users), ("path", 4, paths)][asked]
    counts = random.sample(range(3, 10), 5)
    drawn = [values[0]] * (max(counts) + random.randint(2, 6))
    drawn += [value for value, times in zip(values[1:], counts, strict=True) for _ in range(times)]
    random.shuffle(drawn)
    rows = []
    for value in drawn:
        fields = [random.choice(addresses), random.choice(users), random.choice(["GET", "POST"]), random.choice(paths)]
        fields[place - 1] = value
        rows.append(" ".join([*fields, random.choice(["200", "404", "500"])]))
    best, times = Counter(drawn).most_common(1)[0]
    instruction = random.choice(
        [
            f"Which {what} occurs most often in {file}? Write the {what}, a space and its number of lines to {out}.",
            f"Look at {file} (fields: address user method path status). Find the most frequent {what} and write "
            f"`{what.upper()} COUNT` to {out}.",
            f"Find the {what} with the most requests in {file}, one request a line. {out} should have one line: the "
            f"{what}, a space, the count.",
        ]
    )
    steps: list[Step] = [
        Bash(command=f"head -n 3 {file}"),
        Bash(command=f"cut -d' ' -f{place} {file} | sort | uniq -c | sort -rn | head -n 3"),
        Bash(command=f"echo '{best} {times}' > {out}"),
        Say(text=f"The most frequent {what} is {best}, {times} times."),
    ]
    checks = [lines(out, [f"{best} {times}"], [[f"{times} {best}"], [f"{best}"]])]
    return Draft(instruction, {file: text(rows)}, checks, steps)


def extract(random: Random, index: int) -> Draft:
    """Unique, sorted matches of a pattern in running text."""
    file, out = f"{stem(random)}.txt", random.choice(OUTPUTS)
    letters = random.choice(["ORD", "INV", "TKT", "REF"])
    mails = [f"{n.lower()}@{random.choice(GOODS)}.example" for n in random.sample(NAMES, 9)]
    codes = [f"{letters}-{value}" for value in random.sample(range(10000, 99999), 9)]
    dates = [f"2026-{m:02d}-{d:02d}" for m, d in zip(random.sample(range(1, 13), 9), random.sample(range(1, 29), 9))]  # noqa: B905
    what, form, pattern, values = [
        ("mail addresses", "like `bob@desk.example`", "[a-z]+@[a-z]+[.]example", mails),
        ("codes", f"like `{letters}-12345`", f"{letters}-[0-9]{{5}}", codes),
        ("dates", "like `2026-01-31`", "[0-9]{4}-[0-9]{2}-[0-9]{2}", dates),
    ][index % 3]
    rows = [sentence(random) for _ in range(random.randint(14, 26))]
    others = [value for other in (mails, codes, dates) if other is not values for value in other[:3]]
    for value in [*random.choices(values, k=8), *values, *others]:
        place = random.randrange(len(rows))
        rows[place] += random.choice([f" ({value})", f", see {value}.", f" and {value}"])
    found = sorted((match for match in values), key=lambda value: value)
    instruction = random.choice(
        [
            f"{file} contains {what} {form}. Write each different one once to {out}, one a line, sorted.",
            f"Extract all {what} ({form}) from {file}. Save them in {out}: sorted, without duplicates, one a line.",
            f"Find every {what[:-1] if what != 'mail addresses' else 'mail address'} {form} in {file}. {out} should "
            "list them sorted, one a line, none twice.",
        ]
    )
    steps: list[Step] = [
        Read(path=file),
        Bash(command=f"grep -oE '{pattern}' {file} | sort -u > {out}"),
        Bash(command=f"cat {out}"),
        Say(text=f"{out} lists {len(found)} {what}."),
    ]
    body = "\n".join(rows)
    appearing = sorted((value for value in values for _ in range(body.count(value))), key=body.index)
    near = [list(dict.fromkeys(appearing)), sorted(appearing)]
    return Draft(instruction, {file: text(rows)}, [lines(out, found, near)], steps)


TEMPLATES = (
    Template("log-count", 2, "count log lines of a level, or of a level and a service", count_events),
    Template("log-busiest", 3, "the most frequent address, user or path, with its count", busiest),
    Template("extract-pattern", 3, "unique, sorted mail addresses, codes or dates in a text", extract),
)
