"""Code tasks with a visible test: fix a bug, write a missing function. Several steps; the visible test must stay."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from turngate.tasks.dataops.functions import BROKEN, MISSING, Function
from turngate.tasks.dataops.template import Draft, Template, calls, same
from turngate.tasks.dataops.vocabulary import CITIES, STEMS
from turngate.tasks.steps import Bash, Edit, Read, Say, Step


def fix_function(random: Random, index: int) -> Draft:
    """A function that fails its test."""
    function = BROKEN[(index - 1) % len(BROKEN)]
    module, test, files = _files(random, function)
    instruction = random.choice(
        [
            f"`python3 {test}` fails because of a bug in {module}. Fix {module}; do not change {test}.",
            f"There is a bug in {function.name} in {module}, shown by {test}. Repair it. Leave the test file alone.",
            f"The function {function.name} of {module} is wrong, see {test}. Correct the function, not the test.",
        ]
    )
    steps: list[Step] = [
        Bash(command=f"cat {module}; python3 {test} || true"),
        Edit(path=module, old=function.wrong, new=function.right),
        Bash(command=f"python3 {test}"),
        Say(text=f"{function.name} is fixed and its test passes."),
    ]
    return _draft(function, module, test, files, instruction, steps)


def add_function(random: Random, index: int) -> Draft:
    """A function whose body is missing."""
    function = MISSING[(index - 1) % len(MISSING)]
    module, test, files = _files(random, function)
    instruction = random.choice(
        [
            f"Write the body of {function.name} in {module} as its docstring says; `python3 {test}` has to pass. "
            f"Do not change {test}.",
            f"{function.name} in {module} is empty. Implement it (see its docstring); {test} must pass, unchanged.",
            f"Complete the function {function.name} of {module}. Its test is {test}; leave that file alone.",
        ]
    )
    steps: list[Step] = [
        Read(path=module),
        Edit(path=module, old="    ...", new=f"    {function.right}"),
        Bash(command=f"python3 {test}"),
        Say(text=f"{function.name} is written and its test passes."),
    ]
    return _draft(function, module, test, files, instruction, steps)


def _files(random: Random, function: Function) -> tuple[str, str, dict[str, str]]:
    """Names of module and test, and the workspace's files."""
    name = f"{random.choice(STEMS)}_{random.choice(['tools', 'lib', 'utils', 'helpers'])}"
    module, test = f"{name}.py", f"test_{name}.py"
    head, body = function.buggy.split("\n", 1)
    city, salt = random.choice(CITIES), random.randint(100, 999)
    source = f'"""Helpers of the {city} office, build {salt}."""\n\n\n{head}\n    """{function.doc}"""\n{body}'
    first = ", ".join(repr(argument) for argument in function.cases[0])
    check = (
        f"from {name} import {function.name}\n\nfound = {function.name}({first})\n"
        f'assert found == {function.results()[0]!r}, f"got {{found!r}}"\nprint("passed")\n'
    )
    return module, test, {module: source, test: check}


def _draft(
    function: Function, module: str, test: str, files: dict[str, str], instruction: str, steps: Sequence[Step]
) -> Draft:
    cases = [
        (function.name, arguments, result) for arguments, result in zip(function.cases, function.results(), strict=True)
    ]
    checks = [calls(module, cases), same(test, files[test], gate=True)]
    return Draft(instruction, files, checks, steps)


TEMPLATES = (
    Template("fix-function", 4, "find and fix the bug in a Python function with a failing test", fix_function),
    Template("add-function", 4, "write a missing function from its docstring and a test", add_function),
)
