"""Small data-and-code tasks, generated: the set that a small policy learns from and is measured on.

The generator is the source; folders are written where they are wanted and never committed. The same seed gives the
same bytes. Nothing here starts a process.
"""

from turngate.tasks.dataops.generate import SPLITS, write_set

__all__ = ["SPLITS", "write_set"]
