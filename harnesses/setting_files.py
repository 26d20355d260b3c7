"""Reading settings from YAML: one reader for `run`, `launch`, `train`, `sft` and `eval`, so that all complain alike.

A file that is no UTF-8, no YAML or no mapping is told in words. A key that stands twice is an error: YAML would keep
the last one, and a run would be another than the one that was written at the top.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml


def read_mapping(path: Path, section: str | None = None) -> dict[str, Any]:
    """The mapping in a YAML file; only its `section`, where it has one.

    Raises:
        ValueError: it cannot be read, or is no mapping; the message names the file, and the line where there is one.
    """
    try:
        found = parse_yaml(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        byte = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8 (byte 0x{byte:02x} in line {line}): save it as UTF-8") from error
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if isinstance(found, dict) and section in found:
        found = {} if found[section] is None else found[section]
        path = Path(f"{path}: {section}")
    if not isinstance(found, dict):
        raise ValueError(f"{path}: a configuration is a mapping of keys to values")
    return found


def parse_yaml(text: str) -> Any:
    """The value that `text` is.

    Raises:
        ValueError: it is not YAML, or a key stands twice in a mapping.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but a mapping has each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping's value. Raises ConstructorError for a key that is there already."""
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = self.construct_object(key), key.start_mark.line + 1
            if name in lines:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} stands in line {lines[name]} and again in line {line}; keep one"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)
