"""Refactorings: rename a function everywhere, name a constant, move a function. Behaviour must stay."""

from __future__ import annotations

import re
from random import Random

from turngate.tasks.dataops.template import Check, Draft, Template, as_gate, calls
from turngate.tasks.dataops.vocabulary import CITIES, GOODS
from turngate.tasks.steps import Bash, Edit, Read, Say, Step

VERBS = ["load", "fetch", "parse", "build", "merge", "check", "scale", "pack"]
NOUNS = ["items", "rows", "prices", "values", "names", "parts"]


def rename_function(random: Random, index: int) -> Draft:
    """Three files; a longer name that contains the old one must survive."""
    verb, other = random.sample(VERBS, 2)
    noun = random.choice(NOUNS)
    old, new, longer = f"{verb}_{noun}", f"{other}_{noun}", f"{verb}_{noun}_twice"
    n = random.randint(2, 60)
    core, shop, app = random.sample(["core", "shop", "stock", "engine", "base", "model"], 2) + ["main"]  # noqa: RUF005
    files = {
        f"{core}.py": f"def {old}(x):\n    return x * {n} + 1\n\n\ndef {longer}(x):\n    return {old}({old}(x))\n",
        f"{shop}.py": f"from {core} import {old}, {longer}\n\n\ndef order(x):\n    return {old}(x) + {longer}(x)\n",
        f"{app}.py": f"import {core}\nfrom {shop} import order\n\nprint({core}.{old}({n}), order({n + 1}))\n",
    }
    instruction = random.choice(
        [
            f"Rename the function {old} to {new} in all .py files here. {longer} keeps its name. `python3 {app}.py` "
            "must print the same as before.",
            f"The function {old} should be called {new}: change its definition and every use in the Python files, but "
            f"not {longer}. {app}.py must still run.",
            f"Refactor: {old} becomes {new} everywhere in *.py ({longer} stays). Check with `python3 {app}.py`.",
        ]
    )
    steps: list[Step] = [
        Bash(command=f"grep -n {old} *.py"),
        Bash(command=f"sed -i 's/\\b{old}\\b/{new}/g' *.py"),
        Bash(command=f"grep -n {new} *.py; python3 {app}.py"),
        Say(text=f"{old} is now {new} in all three files."),
    ]
    checks: list[Check] = [
        {"kind": "program", "path": path, "source": re.sub(rf"\b{old}\b", new, source)}
        for path, source in files.items()
    ]
    return Draft(instruction, files, checks, steps)


def name_constant(random: Random, index: int) -> Draft:
    """A number that occurs in three functions becomes a constant."""
    name, value = random.choice(
        [("VAT", 0.21), ("RATE", 1.75), ("FEE", 3.5), ("MARGIN", 0.35), ("BONUS", 0.15), ("WEIGHT", 2.25)]
    )
    value = round(value + random.randint(1, 9) / 100, 2)
    good, city = random.choice(GOODS), random.choice(CITIES)
    module = f"{good}_costs.py"
    a, b, c = random.sample(["net", "gross", "monthly", "total", "single", "final"], 3)
    source = (
        f'"""Costs of a {good} in {city}."""\n\n\n'
        f"def {a}(x):\n    return x * {value}\n\n\n"
        f"def {b}(x, n):\n    return n * (x + {value})\n\n\n"
        f"def {c}(x):\n    return x - {value} / 2\n"
    )
    instruction = random.choice(
        [
            f"The number {value} occurs in three functions of {module}. Define it once as the constant {name} above "
            f"them and use {name} in all three.",
            f"In {module}, replace the number {value} by a module constant {name} = {value} in every function. "
            "Results must not change.",
            f"Refactor {module}: no function should contain {value}; they all use a global {name} that is {value}.",
        ]
    )
    text = str(value).replace(".", "\\.")
    steps: list[Step] = [
        Read(path=module),
        Bash(command=f"sed -i 's/{text}/{name}/' {module}"),
        Bash(command=f"sed -i '3i {name} = {value}' {module}"),
        Bash(command=f"cat {module}"),
        Say(text=f"{name} is a constant now."),
    ]
    before, after = ([(a, [5], 5 * v), (b, [5, 3], 3 * (5 + v)), (c, [5], 5 - v / 2)] for v in (value, 7.0))
    checks = [as_gate(calls(module, before)), *(calls(module, [case], {name: 7.0}) for case in after)]
    return Draft(instruction, {module: source}, checks, steps)


def move_function(random: Random, index: int) -> Draft:
    """One function to a module of its own; the program must print the same."""
    verb, noun, n = random.choice(VERBS), random.choice(NOUNS), random.randint(3, 70)
    moved, kept = f"{verb}_{noun}", f"sum_{noun}"
    old, new = random.sample(["tools", "misc", "parts", "extra", "shared"], 2)
    body = f"def {moved}(x):\n    return x * {n} - 2\n"
    rest = f"def {kept}(values):\n    return sum(values) + {n}\n"
    main = f"from {old} import {kept}\nfrom {old} import {moved}\n\nprint({kept}([1, {n}]), {moved}({n}))\n"
    shown = f"{n + 1 + n} {n * n - 2}"
    files = {f"{old}.py": f"{body}\n\n{rest}", "main.py": main}
    instruction = random.choice(
        [
            f"Move the function {moved} from {old}.py to a new file {new}.py and adapt the import in main.py. "
            "`python3 main.py` must still work.",
            f"{moved} does not belong into {old}.py. Put it into {new}.py (new) and let main.py import it from there; "
            "what main.py prints stays the same.",
            f"Refactor: take {moved} out of {old}.py, define it in {new}.py, fix main.py. {kept} stays where it is.",
        ]
    )
    steps: list[Step] = [
        Bash(command=f"cat {old}.py main.py"),
        Bash(command=f"head -n 2 {old}.py > {new}.py && sed -i '1,4d' {old}.py"),
        Edit(path="main.py", old=f"from {old} import {moved}", new=f"from {new} import {moved}"),
        Bash(command="python3 main.py"),
        Say(text=f"{moved} lives in {new}.py now."),
    ]
    checks: list[Check] = [
        as_gate(calls(f"{new}.py", [(moved, [4], 4 * n - 2), (moved, [0], -2)])),
        {"kind": "defines", "path": f"{old}.py", "present": [kept], "missing": [moved]},
        as_gate({"kind": "prints", "path": "main.py", "lines": [shown]}),
    ]
    return Draft(instruction, files, checks, steps)


TEMPLATES = (
    Template("rename-function", 4, "rename a function in three files", rename_function),
    Template("name-constant", 4, "one constant for a number in three functions", name_constant),
    Template(
        "move-function",
        4,
        "move a function to a new module, fix the import",
        move_function,
        held_out=True,
    ),
)
