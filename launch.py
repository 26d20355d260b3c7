# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["turngate[train,export,engine-gpu]", "pip"]
# ///
"""Run the whole loop as one job: `python launch.py examples/demo.yaml [key=value ...]`.

In a clone, after `make setup`, any Python 3.11 or newer will do. Elsewhere `uv run launch.py CONFIG` installs what the
header names. So one HF Job runs everything, on one machine; what it made stays on a volume:

    hf jobs uv run --flavor h200 --timeout 6h --secrets HF_TOKEN -v hf://buckets/ME/runs:/data \\
        launch.py /data/CONFIG.yaml out=/data/runs

(`--with git+URL` takes the package from a repository instead of the index.) A job that was cut off goes on with
`launch.py --resume /data/runs/ID`. This file only finds the package and hands over to `turngate.trainer.supervise`.
"""

import os
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parent / os.environ.get("TURNGATE_VENV", ".venv") / "bin" / "python"


def main() -> int:
    """Hand over to the supervisor, in the clone's own environment when this interpreter lacks the package."""
    try:
        from turngate.proxy.cli import main as turngate
    except ModuleNotFoundError as error:
        if PYTHON.is_file() and Path(sys.prefix).resolve() != PYTHON.parent.parent:
            os.execv(PYTHON, [str(PYTHON), str(Path(__file__).resolve()), *sys.argv[1:]])
        print(f"launch.py: {error}: type `make setup`, or run it as `uv run launch.py CONFIG`", file=sys.stderr)
        return 1
    return turngate(["launch", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
