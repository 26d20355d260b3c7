#!/usr/bin/env python3
"""The conformance suite against Turngate, a plain vLLM and OpenEnv's capture proxy, on one real vLLM server.

    python bench/conformance.py [--tokenizer FOLDER] [--target NAME …] [--defect NAME …]

Starts vLLM with a tiny model of random weights that has a real tokenizer and chat template (`tiny_model.py`), hermes
tool calls and qwen3 reasoning; what the model says is decided by a grammar (tests/conformance/relay.py). OpenEnv is
installed from PyPI at the first run. Writes bench/results/conformance.json, of which docs/generate.py makes
docs/conformance.md; a run of some targets or defects keeps the results of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tiny_model import make_tiny
from tests.conformance.defects import DEFECTS
from tests.conformance.engines import CONTEXT_TOKENS
from tests.conformance.targets import TARGETS
from tests.conftest import find_model
from tests.engines import vllm_server

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "conformance.json"
ENGINE_ARGS = (
    *("--enforce-eager", "--block-size", "32", "--max-model-len", str(CONTEXT_TOKENS)),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    *("--structured-outputs-config.backend", "xgrammar"),
    *("--structured-outputs-config.enable_in_reasoning", "true"),
    *("--structured-outputs-config.disable_any_whitespace", "true"),
)
"""The grammar that makes the model speak has to hold from the first token on, whatever a reasoning parser thinks."""


def outcome(cases: list[list[str]]) -> dict[str, Any]:
    """One result of a test's cases: the worst one, and how many were that."""
    for worst in ("fails", "not offered"):
        words = [words for case, words in cases if case == worst]
        if words:
            return {"outcome": worst, "words": words[0], "of": [len(words), len(cases)]}
    return {"outcome": "holds", "words": "", "of": [len(cases), len(cases)]}


def run(target: str, url: str, adapter: Path, folder: Path, defects: list[str]) -> dict[str, Any]:
    """The suite, or the tests of some defects, against one target, in a pytest of its own.

    Raises:
        RuntimeError: it did not get as far as to write its results.
    """
    written = folder / f"{target}.json"
    env = os.environ | {
        "TURNGATE_CONFORMANCE_TARGET": target,
        "TURNGATE_CONFORMANCE_ENGINE": url,
        "TURNGATE_CONFORMANCE_ADAPTER": str(adapter),
        "TURNGATE_CONFORMANCE_RESULTS": str(written),
    }
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "tests/conformance"]
    argv += ["-k", " or ".join(defects)] if defects else []
    done = subprocess.run([*argv, "--basetemp", str(folder / f"{target}-files")], cwd=ROOT, env=env, check=False)
    found = json.loads(written.read_text()) if written.exists() else {}
    if "version" not in found:
        raise RuntimeError(f"the suite against {target} ended with {done.returncode} and without results")
    outcomes = {name: outcome(found["outcomes"][name]) for name in defects or DEFECTS}
    return {"version": found["version"], "engine": found["engine"], "outcomes": outcomes}


def main() -> int:
    """Run what was asked for, and say in a line what came of it."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, help="a model folder (default: qwen-coder-0.5b)")
    parser.add_argument("--target", dest="targets", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument(
        "--defect", dest="defects", action="append", default=[], choices=list(DEFECTS), help="only these"
    )
    parser.add_argument("--engine", metavar="URL", help="a server that runs already, as ENGINE_ARGS has it")
    parser.add_argument("--adapter", type=Path, help="a LoRA of that server's model")
    args = parser.parse_args()
    tokenizer = args.tokenizer or find_model("qwen-coder-0.5b")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"targets": {}}
    with tempfile.TemporaryDirectory(prefix="turngate-conformance-") as place:
        folder = Path(place)
        with ExitStack() as stack:
            url, adapter = args.engine, args.adapter
            if url is None:
                adapter = folder / "lora"
                make_tiny(tokenizer, folder / "tiny", adapter, context_tokens=CONTEXT_TOKENS)
                url = stack.enter_context(vllm_server(folder / "tiny", folder / "vllm.log", *ENGINE_ARGS)).url
            for target in args.targets or TARGETS:
                found = run(target, url, adapter, folder, args.defects)
                before = results["targets"].get(target, {}).get("outcomes", {}) if args.defects else {}
                results["targets"][target] = {**found, "outcomes": {**before, **found["outcomes"]}}
    results |= {"defects": DEFECTS, "python": platform.python_version()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    counts = {
        name: {kind: sum(one["outcome"] == kind for one in told["outcomes"].values()) for kind in KINDS}
        for name, told in results["targets"].items()
    }
    print(json.dumps(counts))
    return 0


KINDS = ("holds", "fails", "not offered")

if __name__ == "__main__":
    raise SystemExit(main())
