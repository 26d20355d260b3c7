#!/usr/bin/env python3
"""`python -m turngate.trainer.plain_marks MODEL OUT`, from a checkout that is not installed."""

from __future__ import annotations

import sys

from turngate.trainer.plain_marks import main

if __name__ == "__main__":
    sys.exit(main())
