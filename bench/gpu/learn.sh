#!/usr/bin/env bash
# Learning on one GPU in commands of ten minutes: demonstrations, fine-tuning, RL and held-out evaluations, resumed.
#
#   bench/gpu/learn.sh MODEL_FOLDER OUT_FOLDER [launch overrides, e.g. train.steps=40]
#
# Call it again while the machine is warm: vLLM is left running, the run goes on from its last checkpoint. FINISH=1
# makes no more steps and evaluates what there is. LIMIT_S (570) is the time of one call; LEARN_CONFIG another file;
# ENGINE_URL a vLLM that runs already. OUT_FOLDER always holds the newest figures (learn.json), evals.jsonl,
# metrics.jsonl, the logs and the best adapter in parts below 16 MB. Status 124: time was up, call again.
set -uo pipefail
model=$1 out=$2
shift 2
limit=${LIMIT_S:-570}
here=$(cd "$(dirname "$0")/../.." && pwd)
state=${LEARN_STATE:-/tmp/turngate-learn}
engine_url=${ENGINE_URL:-http://127.0.0.1:8000}
mkdir -p "$out" "$state/path/turngate" "$state/runs"
for part in proxy trainer harnesses tasks; do ln -sfn "$here/$part" "$state/path/turngate/$part"; done
export PYTHONPATH="$state/path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
cd "$here" || exit 1

if ! curl -sf "$engine_url/health" > /dev/null; then
  OMP_NUM_THREADS=1 setsid nohup python3 -m vllm.entrypoints.cli.main serve "$model" --served-model-name "$(basename "$model")" \
    --host 127.0.0.1 --port 8000 --dtype bfloat16 --max-model-len 8192 --max-num-seqs 128 --enable-lora --max-loras 6 \
    --max-lora-rank 16 --logprobs-mode processed_logprobs --generation-config vllm --enable-auto-tool-choice \
    --tool-call-parser hermes --gpu-memory-utilization 0.4 --stream-interval 16 --disable-uvicorn-access-log \
    > "$state/vllm.log" 2>&1 < /dev/null &
  engine=$!
  until curl -sf "$engine_url/health" > /dev/null; do
    kill -0 $engine 2> /dev/null || { tail -40 "$state/vllm.log"; exit 1; }
    [ $SECONDS -lt "$limit" ] || { echo "vLLM is not up after $SECONDS s"; exit 124; }
    sleep 1
  done
fi
echo "vLLM up after $SECONDS s"

sandbox=bubblewrap
bwrap --unshare-all --ro-bind / / --proc /proc true 2> /dev/null || sandbox=process
echo "sandbox: $sandbox"

newest() { ls -d "$state"/runs/*/ 2> /dev/null | tail -n 1; }
collect() { # everything small, at any moment; $1: more options of the report
  local run
  run=$(newest) && [ -n "$run" ] || return 0
  cp "$run"metrics.jsonl "$run"evals.jsonl "$out/" 2> /dev/null
  tar -C "$run" -czf "$out/.logs" logs config.yaml run.json 2> /dev/null && mv "$out/.logs" "$out/logs.tar.gz"
  python3 bench/gpu/learn_report.py "$run" --sandbox $sandbox --engine "$engine_url" ${1:-} > "$out/.report" \
    2> "$state/report.log" && mv "$out/.report" "$out/learn.json"
}
(while sleep 45; do collect --quick; done) &
collector=$!
trap 'kill $collector 2> /dev/null' EXIT

run=$(newest)
words=("${LEARN_CONFIG:-examples/learn.yaml}" model="$model" engine.url="$engine_url" out="$state/runs" run.sandbox=$sandbox)
[ -z "$run" ] || words=(--resume "$run")
if [ -n "${FINISH:-}" ] && [ -n "$run" ]; then
  done=$(python3 -c 'import json,sys; print(max([1, *(json.loads(l)["step"] for l in open(sys.argv[1]))]))' "${run}metrics.jsonl" 2> /dev/null || echo 1)
  set -- "$@" train.steps="$done"
fi
left=$((limit - SECONDS - 60))
echo "launch for $left s: ${words[*]} $*"
status=0
timeout -s TERM -k 40 "$left" python3 launch.py "${words[@]}" "$@" > "$out/launch.log" 2>&1 || status=$?
tail -25 "$out/launch.log"
kill $collector 2> /dev/null
wait $collector 2> /dev/null
rm -f "$out/.logs" "$out/.report"
collect
cat "$out/learn.json" || tail -5 "$state/report.log"
run=$(newest)
adapter=$(ls -d "${run}best" 2> /dev/null || ls -dt "${run}"adapters/step-* "${run}warm_start/adapter" 2> /dev/null | head -n 1)
[ -z "$adapter" ] || tar -C "$(dirname "$adapter")" -czf - "$(basename "$adapter")" | split -b 15m - "$out/adapter.tar.gz."
echo "ended with status $status after $SECONDS s"
exit $status
