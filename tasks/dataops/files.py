"""Files as things: write one, move, copy or delete one, count them. One command or one write."""

from __future__ import annotations

from random import Random

from turngate.tasks.dataops.template import Draft, Template, as_gate, lines, number, same, text
from turngate.tasks.dataops.vocabulary import NAMES, OUTPUTS, STEMS, sentence, stem
from turngate.tasks.steps import Bash, Say, Step, Write


def write_file(random: Random, index: int) -> Draft:
    """A new file with given text."""
    name = f"{stem(random)}.{random.choice(['txt', 'md', 'cfg'])}"
    path = name if index % 3 else f"{random.choice(['notes', 'docs', 'etc'])}/{name}"
    rows = [sentence(random)] if index % 2 else [sentence(random), sentence(random)]
    quoted = " and then ".join(f"`{row}`" for row in rows)
    unit = "the line" if len(rows) == 1 else "two lines:"
    instruction = random.choice(
        [
            f"Create the file {path} with {unit} {quoted} (without the backquotes).",
            f"Write {unit} {quoted} to {path}. The backquotes are not part of the text.",
            f"Make a new file {path}. It should hold {unit} {quoted}, nothing else, no backquotes.",
            f"Please save {unit} {quoted} as {path} (leave the backquotes out).",
        ]
    )
    steps: list[Step] = [Write(path=path, content=text(rows)), Say(text=f"Created {path}.")]
    return Draft(instruction, {"README.txt": text([sentence(random)])}, [lines(path, rows)], steps)


def move_file(random: Random, index: int) -> Draft:
    """Rename, copy, delete, or move into a folder."""
    names = [f"{name}.{random.choice(['txt', 'log', 'dat'])}" for name in random.sample(STEMS, 4)]
    file, *others = names
    files = {name: text([sentence(random) for _ in range(random.randint(5, 12))]) for name in names}
    target = f"{random.choice(['final', 'saved', 'kept'])}_{random.randint(10, 99)}.txt"
    folder = random.choice(["archive", "done", "attic"])
    files[f"{folder}/first.txt"] = text([sentence(random) for _ in range(5)])
    action = index % 4
    gone = {"kind": "absent", "path": file}
    unchanged = [as_gate(same(name, files[name])) for name in [*others, f"{folder}/first.txt"]]
    if action == 0:
        words = [f"Rename {file} to {target}.", f"The file {file} should be called {target} from now on."]
        words += [f"Give {file} the new name {target}.", f"Change the name of {file} into {target}."]
        command, checks = f"mv {file} {target}", [same(target, files[file]), as_gate(gone)]
    elif action == 1:
        words = [f"Copy {file} to {target}; keep {file} too.", f"Make a copy of {file} and name it {target}."]
        words += [f"I want {target} to be a second copy of {file}.", f"Duplicate {file} as {target}."]
        command, checks = f"cp {file} {target}", [same(target, files[file]), same(file, files[file], gate=True)]
    elif action == 2:
        words = [f"Delete {file} and nothing else.", f"Remove the file {file}; the other files stay."]
        words += [f"{file} is not needed any more: delete only it.", f"Get rid of {file}, but keep everything else."]
        command, checks = f"rm {file}", [gone]
    else:
        words = [f"Move {file} into the folder {folder}.", f"{file} belongs into {folder}/; put it there."]
        words += [f"Put {file} away: move it to {folder}/.", f"The folder {folder} should contain {file}. Move it."]
        command, checks = f"mv {file} {folder}/", [same(f"{folder}/{file}", files[file]), as_gate(gone)]
    steps: list[Step] = [Bash(command=command), Say(text="Done.")]
    return Draft(random.choice(words), files, [*checks, *unchanged], steps)


def count_files(random: Random, index: int) -> Draft:
    """How many files of a kind a folder has."""
    folder, out = random.choice(["data", "inbox", "photos", "dump"]), random.choice(OUTPUTS)
    kinds = random.sample(["log", "csv", "txt", "json", "tmp"], 3)
    files = {}
    for kind in kinds:
        for place in range(random.randint(4, 19)):
            files[f"{folder}/{random.choice(NAMES).lower()}{place}.{kind}"] = text([sentence(random)])
    count = sum(name.endswith(f".{kinds[0]}") for name in files)
    instruction = random.choice(
        [
            f"How many .{kinds[0]} files are in the folder {folder}? Write only the number to {out}.",
            f"Count the files in {folder} whose name ends in .{kinds[0]} and put the number into {out}.",
            f"The folder {folder} has some .{kinds[0]} files. Write how many there are to {out}, as a number.",
            f"{out} should hold the number of .{kinds[0]} files in {folder}. Create it.",
            f"Save the number of .{kinds[0]} files of the folder {folder} as {out} (just the number).",
        ]
    )
    steps: list[Step] = [Bash(command=f"ls {folder}/*.{kinds[0]} | wc -l > {out}"), Say(text="Done.")]
    return Draft(instruction, files, [number(out, count)], steps)


TEMPLATES = (
    Template("write-file", 1, "a new file with given text", write_file),
    Template("move-file", 1, "rename, copy, delete or move one of several files", move_file),
    Template("count-files", 1, "count files of a kind in a folder", count_files, held_out=True),
)
