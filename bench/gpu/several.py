"""The same three steps by one process, by two (DDP) and by two that shard the model (FSDP2): one JSON object.

python bench/gpu/several.py MODEL_FOLDER WORK [--ways one ddp fsdp2] [--wrap Qwen2DecoderLayer]

The model is a random one of two small layers, with MODEL_FOLDER's architecture and tokenizer. Rows are hand-made, the
gateway is the tests' stub. `largest_difference` is between the adapters that a way and `one` ended with,
`largest_weight` the largest weight of it; `metrics` are the steps' own, which must agree as well. The third step is
made after a resume from the checkpoint of the second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file  # noqa: E402

from tests.trainer.stub_gateway import KEY, StubGateway  # noqa: E402
from tests.trainer.test_several_processes import MAIN, near_uniform  # noqa: E402
from turngate.trainer.progress import read_metrics  # noqa: E402
from turngate.trainer.settings import ADMIN_KEY_VARIABLE  # noqa: E402

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
METRICS = ("loss", "grad_norm", "ratio_mean", "kl", "entropy", "tokens")


def small(model: Path, work: Path) -> Path:
    """A random model of two small layers, whose log-probs are near those of the rows."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    config.update(
        {"vocab_size": 49152, "pad_token_id": 0, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    )
    config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512})
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(work / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(work / "model")
    return work / "model"


def run(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Three steps, the last one after a resume."""
    out = args.work / way
    out.mkdir(parents=True)
    processes = 1 if way == "one" else 2
    env = {**os.environ, ADMIN_KEY_VARIABLE: KEY, "OMP_NUM_THREADS": "2"}
    if way == "fsdp2":
        env |= FSDP2 | {"FSDP_TRANSFORMER_CLS_TO_WRAP": args.wrap}
    (out / "main.py").write_text(MAIN)
    began = time.monotonic()
    with StubGateway(None) as stub:
        stub.prepared = [near_uniform(number) for number in range(6)]
        for steps in (2, 3):
            settings = {
                "model": str(args.model),
                "gateway": stub.url,
                "output": str(out),
                "steps": steps,
                "groups_per_step": 2,
                "token_budget": 20,
                "learning_rate": 1e-2,
                "dtype": args.dtype,
                "device": args.device,
                "lora_targets": ["q_proj", "v_proj"],
                "report_to": [],
            }
            (out / "run.yaml").write_text(json.dumps({"train": settings}))
            words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            words += [str(out / "main.py"), "--config", str(out / "run.yaml")]
            try:
                done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=args.limit_s, check=False)
            except subprocess.TimeoutExpired as error:
                return {"failed": f"step {steps}: no end after {args.limit_s:.0f} s", "stderr": _end(error.stderr)}
            if done.returncode:
                return {"failed": f"step {steps}: status {done.returncode}", "stderr": _end(done.stderr)}
        versions = [version.path for version in stub.versions]
    lines = read_metrics(out / "metrics.jsonl")
    metrics = {name: [line.get(name) for line in lines] for name in METRICS}
    return {"versions": versions, "seconds": round(time.monotonic() - began, 1), "metrics": metrics}


def _end(text: str | bytes | None) -> str:
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text or ""
    return words[-3000:]


def main() -> int:
    """Print the object."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--ways", nargs="+", default=["one", "ddp", "fsdp2"], choices=["one", "ddp", "fsdp2"])
    parser.add_argument("--wrap", default="Qwen2DecoderLayer", help="class of the layers that FSDP2 shards")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--limit-s", type=float, default=90.0, help="longest start of one way")
    args = parser.parse_args()
    args.work.mkdir(parents=True)
    args.model = small(args.model, args.work)
    found: dict[str, Any] = {}
    for way in args.ways:
        found[way] = run(way, args)
        print(json.dumps({way: found[way]}), file=sys.stderr, flush=True)
    last = {
        way: load_file(Path(one["versions"][-1]) / "adapter_model.safetensors")
        for way, one in found.items()
        if "versions" in one
    }
    for way, weights in last.items():
        found[way]["largest_weight"] = max(float(tensor.abs().max()) for tensor in weights.values())
        if "one" in last:
            found[way]["largest_difference"] = max(
                float((weights[name].float() - tensor.float()).abs().max()) for name, tensor in last["one"].items()
            )
        found[way]["versions"] = len(found[way]["versions"])
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
