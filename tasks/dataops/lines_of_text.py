"""Plain text files: count, take, find, sort, replace. Mostly one command."""

from __future__ import annotations

from random import Random

from turngate.tasks.dataops.template import Check, Draft, Template, as_gate, lines, number, same, text
from turngate.tasks.dataops.vocabulary import GOODS, OUTPUTS, REMARKS, sentence, stem
from turngate.tasks.steps import Bash, Say, Step


def count_lines(random: Random, index: int) -> Draft:
    """Lines, words, or lines with a word."""
    file, out, word = f"{stem(random)}.txt", random.choice(OUTPUTS), random.choice(GOODS)
    rows = [sentence(random) for _ in range(random.randint(12, 48))]
    marked = random.sample(range(len(rows)), random.randint(6, len(rows) - 3))
    rows = [f"{row} ({word})" if place in marked else row.replace(word, "thing") for place, row in enumerate(rows)]
    what, command, value = [
        ("lines", f"wc -l < {file} > {out}", len(rows)),
        ("words", f"wc -w < {file} > {out}", sum(len(row.split()) for row in rows)),
        (f"lines containing the word {word}", f"grep -c {word} {file} > {out}", len(marked)),
    ][index % 3]
    instruction = random.choice(
        [
            f"Count the {what} in {file}. Write only the number to {out}.",
            f"How many {what} does {file} have? Put the number, nothing else, into {out}.",
            f"Write the number of {what} of the file {file} to {out}.",
            f"{out} should hold one number: the count of {what} in {file}. Create it.",
            f"I need to know how many {what} there are in {file}. Save just the number as {out}.",
        ]
    )
    return Draft(instruction, {file: text(rows)}, [number(out, value)], [Bash(command=command), Say(text="Done.")])


def take_lines(random: Random, index: int) -> Draft:
    """First, last, one, or a range of lines."""
    file, out = f"{stem(random)}.txt", random.choice(OUTPUTS)
    rows = [sentence(random) for _ in range(random.randint(20, 50))]
    n = random.randint(3, 12)
    first = random.randint(3, 8)
    what, command, wanted = [
        (f"first {n} lines", f"head -n {n} {file} > {out}", rows[:n]),
        (f"last {n} lines", f"tail -n {n} {file} > {out}", rows[-n:]),
        (f"line number {n}", f"sed -n '{n}p' {file} > {out}", [rows[n - 1]]),
        (f"lines {first} to {first + n}", f"sed -n '{first},{first + n}p' {file} > {out}", rows[first - 1 : first + n]),
    ][index % 4]
    instruction = random.choice(
        [
            f"Write the {what} of {file} to {out}.",
            f"Copy the {what} of {file} into a new file {out}, unchanged.",
            f"Take {file} and save its {what} (only that) as {out}.",
            f"Create {out} with the {what} from {file}.",
            f"Put the {what} of the file {file} into {out}.",
        ]
    )
    return Draft(instruction, {file: text(rows)}, [lines(out, wanted)], [Bash(command=command), Say(text="Done.")])


def find_lines(random: Random, index: int) -> Draft:
    """Lines with a word, or without it."""
    file, out, word = f"{stem(random)}.log", random.choice(OUTPUTS), random.choice(["alpha", "delta", "omega", "sigma"])
    rows = [f"{random.randint(100, 999)} {random.choice(REMARKS)}" for _ in range(random.randint(15, 45))]
    marked = set(random.sample(range(len(rows)), random.randint(5, 11)))
    rows = [f"{row} [{word}]" if place in marked else row for place, row in enumerate(rows)]
    inside = [row for place, row in enumerate(rows) if place in marked]
    outside = [row for place, row in enumerate(rows) if place not in marked]
    if index % 3:
        what, command, wanted = f"contain {word}", f"grep {word} {file} > {out}", inside
    else:
        what, command, wanted = f"do not contain {word}", f"grep -v {word} {file} > {out}", outside
    instruction = random.choice(
        [
            f"Write all lines of {file} that {what} to {out}.",
            f"Find the lines in {file} which {what} and save them, in the same order, as {out}.",
            f"Put the lines of {file} that {what} into {out}.",
            f"Create {out}: only those lines of {file} that {what}.",
            f"Which lines of {file} {what}? Copy them to {out}.",
        ]
    )
    return Draft(instruction, {file: text(rows)}, [lines(out, wanted)], [Bash(command=command), Say(text="Done.")])


def sort_lines(random: Random, index: int) -> Draft:
    """Sort by text or number, drop duplicates, keep the top."""
    file, out, n = f"{stem(random)}.txt", random.choice(OUTPUTS), random.randint(3, 7)
    goods = random.sample(GOODS, random.randint(10, 20))
    words = random.choices(goods, k=random.randint(24, 40))
    numbers = [str(value) for value in random.sample(range(3, 2000), random.randint(15, 35))]
    unique, down = sorted(set(words)), sorted(numbers, key=int, reverse=True)
    what, command, rows, wanted, near = [
        ("different words, sorted from a to z", f"sort -u {file} > {out}", words, unique, [list(dict.fromkeys(words))]),
        ("numbers, sorted from small to large", f"sort -n {file} > {out}", numbers, down[::-1], []),
        ("numbers, sorted from large to small", f"sort -rn {file} > {out}", numbers, down, []),
        (
            f"{n} largest numbers, the largest first",
            f"sort -rn {file} | head -n {n} > {out}",
            numbers,
            down[:n],
            [down[:n][::-1]],
        ),
    ][index % 4]
    unit = "word" if rows is words else "number"
    instruction = random.choice(
        [
            f"{file} has one {unit} a line. Write the {what}, to {out}, one a line.",
            f"Read {file} (one {unit} on each line) and save to {out} the {what}; one on each line.",
            f"Create {out} with the {what}. The input is {file}, a {unit} a line; write one a line too.",
            f"From {file}, which holds a {unit} on every line, make {out}: the {what}, one on every line.",
        ]
    )
    checks: list[Check] = [lines(out, wanted, near)]
    return Draft(instruction, {file: text(rows)}, checks, [Bash(command=command), Say(text=f"{out} is written.")])


def replace_word(random: Random, index: int) -> Draft:
    """Replace a word everywhere, in one file or in all of a kind."""
    old, new = random.sample(GOODS, 2)
    names = [f"{stem(random)}.txt"] if index % 2 else ["intro.md", "usage.md", "faq.md"]
    other = "keep.conf"
    files = {other: text([f"default = {old}", sentence(random)])}
    for name in names:
        rows = [row for row in (sentence(random) for _ in range(random.randint(12, 24))) if old not in row]
        for place in random.sample(range(len(rows)), 4):
            rows[place] = f"a {old}, and one {old} more"
        files[name] = text(rows)
    where = f"in {names[0]}" if index % 2 else "in all .md files"
    target = names[0] if index % 2 else "*.md"
    instruction = random.choice(
        [
            f"Replace every {old} by {new} {where}. Leave {other} alone.",
            f"Change {old} to {new} everywhere {where}, but do not touch {other}.",
            f"The word {old} has to become {new}, all of them, {where}. {other} must stay as it is.",
            f"Substitute {new} for {old} {where} (each occurrence). Don't edit {other}.",
        ]
    )
    checks = [lines(name, files[name].replace(old, new).splitlines()) for name in names]
    steps: list[Step] = [Bash(command=f"sed -i 's/{old}/{new}/g' {target}"), Say(text=f"Replaced {old} by {new}.")]
    return Draft(instruction, files, [*checks, as_gate(same(other, files[other]))], steps)


TEMPLATES = (
    Template("count-lines", 1, "count lines, words or matching lines of a file", count_lines),
    Template("take-lines", 1, "first, last, n-th lines or a range", take_lines),
    Template("find-lines", 1, "lines with or without a word", find_lines),
    Template("sort-lines", 2, "sort words or numbers, drop duplicates, keep the largest", sort_lines),
    Template("replace-word", 2, "replace a word in one or three files, leaving another alone", replace_word),
)
