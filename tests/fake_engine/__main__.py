"""`python -m tests.fake_engine`: a fake engine in the foreground."""

from __future__ import annotations

import argparse

import uvicorn

from tests.fake_engine.app import make_app
from tests.fake_engine.engine import Engine
from tests.fake_engine.script import Script
from tests.fake_engine.settings import FakeSettings, Fault
from tests.fake_engine.tokens import Tokens


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m tests.fake_engine", description="A fake vLLM for tests and load"
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", required=True, help="model folder: tokenizer.json, its config and template")
    parser.add_argument("--template", default="qwen", help="qwen (the model's own), drop-reasoning, or a file")
    parser.add_argument("--script", help="JSON file of answers; without it filler text")
    parser.add_argument("--filler-chars", type=int, default=400, help="length of the filler answer")
    parser.add_argument("--fillers", help="JSON file: a list of answers, chosen by the end of the prompt")
    parser.add_argument("--keep-times", action="store_true", help="how long turns took, at /fake/times")
    parser.add_argument("--model", default="fake", help="served model name")
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--latency-first-s", type=float, default=0.0)
    parser.add_argument("--tokens-per-s", type=float)
    parser.add_argument("--chunk", type=int, default=1, help="tokens an event")
    parser.add_argument("--no-intervals", action="store_true", help="stream_interval is ignored, as before vLLM 0.32")
    parser.add_argument("--no-exact", action="store_true", help="no render, generate and derender")
    parser.add_argument("--no-parser", action="store_true", help="no tool and reasoning parser")
    parser.add_argument("--raw-logprobs", action="store_true")
    parser.add_argument("--fault", choices=["error", "drop", "stall", "refuse", "abort", "cut"])
    parser.add_argument("--fault-after-tokens", type=int, default=3)
    parser.add_argument("--fault-times", type=int, default=-1)
    args = parser.parse_args()
    settings = FakeSettings(
        model=args.model,
        max_model_len=args.max_model_len,
        latency_first_s=args.latency_first_s,
        tokens_per_s=args.tokens_per_s,
        chunk_tokens=args.chunk,
        exact=not args.no_exact,
        parser=not args.no_parser,
        raw_logprobs=args.raw_logprobs,
        keep_requests=0,
        keep_times=args.keep_times,
        intervals=not args.no_intervals,
    )
    fillers = Script.load(args.fillers).answers[""] if args.fillers else ()
    script = Script.load(args.script) if args.script else Script(filler_chars=args.filler_chars, fillers=fillers)
    engine = Engine(Tokens(args.tokenizer, args.template), script, settings)
    if args.fault:
        engine.fault = Fault(args.fault, args.fault_after_tokens, args.fault_times)
    uvicorn.run(make_app(engine), host="127.0.0.1", port=args.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
