#!/usr/bin/env bash
# The whole loop on one GPU, from a machine that may reach nothing: vLLM, gateway, pi, trainer, verify, figures.
#
#   bench/gpu/smoke.sh MODEL_FOLDER OUT_FOLDER [launch overrides, e.g. train.steps=8]
#
# Needs on the Python path: turngate's dependencies and a vLLM 0.26 to 0.32; a pi under $TURNGATE_CACHE. Uses
# bubblewrap where it works here and says so where it does not. Leaves smoke.json (the figures), metrics.jsonl,
# overhead.json, the run and the recorded wire of this vLLM in OUT_FOLDER. KEEP_ENGINE=1 leaves vLLM running for a next call.
set -euo pipefail
model=$1 out=$2
shift 2
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
mkdir -p "$out" "$work/path/turngate"
for part in proxy trainer harnesses tasks; do ln -sfn "$here/$part" "$work/path/turngate/$part"; done
export PYTHONPATH="$work/path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
cd "$here"

begun=$SECONDS
if ! curl -sf http://127.0.0.1:8000/health > /dev/null; then
  setsid nohup python3 -m vllm.entrypoints.cli.main serve "$model" --served-model-name "$(basename "$model")" \
    --host 127.0.0.1 --port 8000 --dtype bfloat16 --max-model-len 8192 --max-num-seqs 64 --enable-lora --max-loras 6 \
    --max-lora-rank 16 --logprobs-mode processed_logprobs --generation-config vllm --enable-auto-tool-choice \
    --tool-call-parser hermes --gpu-memory-utilization 0.4 > /tmp/turngate-vllm.log 2>&1 < /dev/null &
  engine=$!
  until curl -sf http://127.0.0.1:8000/health > /dev/null; do
    kill -0 $engine 2> /dev/null || { tail -40 /tmp/turngate-vllm.log; exit 1; }
    sleep 1
  done
  [ -n "${KEEP_ENGINE:-}" ] || trap 'kill $engine 2>/dev/null || true' EXIT
fi
echo "vLLM up after $((SECONDS - begun)) s"
version=$(curl -s http://127.0.0.1:8000/version | python3 -c 'import json,sys; print(json.load(sys.stdin)["version"])')
python3 bench/gpu/record_wire.py http://127.0.0.1:8000 "$work/wire" > "$work/record_wire.json" 2>&1 || tail -5 "$work/record_wire.json"
tar -C "$work" -czf "$out/wire-$version.tar.gz" wire || true

sandbox=bubblewrap
bwrap --unshare-all --ro-bind / / --proc /proc true || sandbox=process
echo "sandbox: $sandbox"
status=0
timeout "${LAUNCH_LIMIT_S:-300}" python3 launch.py examples/gpu.yaml model="$model" engine.url=http://127.0.0.1:8000 \
  out="$work/runs" run.sandbox=$sandbox "$@" > "$out/launch.log" 2>&1 || status=$?
tail -25 "$out/launch.log"
run=$(ls -d "$work"/runs/*/ | tail -n 1)
cp "$run"/metrics.jsonl "$out/" || true
tar -C "$run" -czf "$out/run.tar.gz" --exclude=adapters --exclude=checkpoints . || true
python3 bench/bench_overhead.py --engine http://127.0.0.1:8000 --sessions 16 --turns 6 --tokens 64 --laps 2 > "$out/overhead.json" || true
tail -c 2000 "$out/overhead.json"
python3 bench/gpu/report.py "$run" --overhead "$out/overhead.json" --vllm "$version" --sandbox $sandbox > "$out/smoke.json"
cat "$out/smoke.json"
exit $status
