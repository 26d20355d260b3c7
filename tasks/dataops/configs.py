"""Configuration files: set, add or remove a key and leave the rest as it is."""

from __future__ import annotations

from random import Random

from turngate.tasks.dataops.template import Draft, Template, settings, text
from turngate.tasks.dataops.vocabulary import SERVICES
from turngate.tasks.steps import Bash, Say, Step

KEYS = ["PORT", "TIMEOUT", "RETRIES", "WORKERS", "CACHE_SIZE", "MAX_ITEMS", "BATCH", "LIMIT", "DELAY", "DEPTH"]


def set_key(random: Random, index: int) -> Draft:
    """One key of an env or ini file."""
    ini = index % 2 == 0
    file = f"{random.choice(['app', 'service', 'worker', 'site'])}.{'ini' if ini else 'env'}"
    keys = random.sample(KEYS, 7)
    values = {key: str(random.randint(2, 9000)) for key in keys[:6]}
    key, new = random.choice(keys[:6]), str(random.randint(9001, 9999))
    section = random.choice(SERVICES)
    action = "set" if ini else ("set", "add", "remove")[index // 2 % 3]
    shown = str.lower if ini else str
    head = [f"[{section}]"] if ini else ["# written by hand"]
    rows = [*head, *(f"{shown(name)}={value}" for name, value in values.items())]
    wanted = dict(values)
    if action == "add":
        key = keys[6]
        wanted[key] = new
        words = [f"Add the setting {key}={new} to {file}.", f"{file} lacks {key}. Add it, with the value {new}."]
        words += [f"Append {key}={new} to the settings in {file}; change nothing else."]
        command = f"echo '{key}={new}' >> {file}"
    elif action == "remove":
        del wanted[key]
        words = [f"Remove the setting {key} from {file}.", f"Delete the line that sets {key} in {file}."]
        words += [f"{file} should not set {key} any more; keep the other settings."]
        command = f"sed -i '/^{key}=/d' {file}"
    else:
        wanted[key] = new
        name = shown(key)
        words = [f"Set {name} to {new} in {file}.", f"In {file}, change the value of {name} to {new}."]
        words += [f"{name} in {file} should be {new}; leave everything else.", f"Edit {file} so that {name}={new}."]
        command = f"sed -i 's/^{name}=.*/{name}={new}/' {file}"
    value = {section: {name.lower(): value for name, value in wanted.items()}} if ini else wanted
    steps: list[Step] = [Bash(command=command), Say(text=f"{file} is updated.")]
    checks = [settings(file, "ini" if ini else "env", value)]
    return Draft(random.choice(words), {file: text(rows)}, checks, steps)


TEMPLATES = (Template("set-key", 2, "set, add or remove a key of an env or ini file", set_key),)
