"""Write the fixture store of the schema that this checkout writes: run it in the checkout of each schema's release.

    python -m tests.proxy.store.released.make FOLDER

Fixtures are never written anew: they are what a release left on somebody's disk.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

from tests.proxy.store.samples import make_rollout_turns, make_store
from turngate.proxy import wire
from turngate.proxy.store.control import ControlStore
from turngate.proxy.store.control_schema import MIGRATIONS as CONTROL
from turngate.proxy.store.turnstore import MIGRATIONS as TURNS
from turngate.proxy.store.turnstore import TurnStore


def main(folder: Path) -> None:
    """`FOLDER/control-C.turns-T`: a trained group of two rollouts, and one that is still open."""
    path = folder / f"control-{len(CONTROL)}.turns-{len(TURNS)}"
    sample = make_store(path)
    secret = hashlib.sha256(b"open secret").digest()
    with ControlStore(sample.folder.control) as control, TurnStore(sample.folder.turns(0)) as turns:
        control.create_rollout("rollout-open", secret, wire.NewRollout(task="count"), "policy", 0, 40)
        turns.commit(make_rollout_turns("rollout-open")[:2])
    for lock in path.glob("*.lock"):
        lock.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
