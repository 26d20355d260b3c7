#!/usr/bin/env bash
# Two GPUs, one command: publications under streams, then the asynchronous and the synchronous schedule, each as long.
#
#   bench/gpu/two.sh MODEL_FOLDER OUT_FOLDER [launch overrides for both schedules, e.g. run.concurrency=96]
#
# vLLM has GPU 0 (a running one at ENGINE_URL is taken and left running; ENGINE_PID ends the wait for it when it dies),
# the trainer GPU 1. LIMIT_S (560) bounds the whole call: both windows share what the flips leave, WINDOW_S (150) at most.
# ADAPTER: a peft folder to begin from and to flip; DEMONSTRATIONS=96 makes it first, of so many tasks. ORDER: which
# schedule comes first ("async sync"). SYNC: overrides of the synchronous run. SKIP_FLIPS=1, TWO_CONFIG, FLIPS_ARGS.
# RENDER_URL: a `vllm launch render` to template and parse beside the engine's API server. HELDOUT_S=250: so long, at the end,
# the base, the beginning and what both schedules ended with are judged on the held-out tasks (heldout.py; in OUT_FOLDER).
# MODEL_FOLDER: of a base never trained to write its tool marks, what `python -m turngate.trainer.plain_marks` makes of it.
# A second call while the machine is warm begins from the same adapter. OUT_FOLDER always holds the newest flips.json,
# two.json, two.log and files.tar.gz (samples, step records, logs): a cut leaves them.
set -uo pipefail
model=$1 out=$2
shift 2
limit=${LIMIT_S:-560}
here=$(cd "$(dirname "$0")/../.." && pwd)
state=${TWO_STATE:-/tmp/turngate-two}
engine_url=${ENGINE_URL:-http://127.0.0.1:8000}
adapter=${ADAPTER:-}
sync_words=(${SYNC:-train.groups_per_step=16})
raw=$state/raw
mkdir -p "$out" "$state/path/turngate" "$state/runs" "$raw"
for part in proxy trainer harnesses tasks; do ln -sfn "$here/$part" "$state/path/turngate/$part"; done
export PYTHONPATH="$state/path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
cd "$here" || exit 1
log() { echo "[$SECONDS s] $*" | tee -a "$out/two.log"; }

sampler=
if command -v nvidia-smi > /dev/null; then
  nvidia-smi --query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv,noheader,nounits -lms 250 \
    > "$raw/gpus.csv" 2> /dev/null &
  sampler=$!
fi
python3 bench/gpu/cpus.py > "$raw/cpus.jsonl" 2> /dev/null &
cores=$!
launch= reporter=
report() { # everything small, at any moment; $1: more options
  for run in "$state"/runs/*/; do
    [ ! -e "${run}metrics.jsonl" ] || cp "${run}metrics.jsonl" "$raw/$(basename "$run").metrics.jsonl"
    tar -C "$run" -czf "$raw/$(basename "$run").logs.tar.gz" logs config.yaml run.json 2> /dev/null
  done
  cp "${ENGINE_LOG:-$state/vllm.log}" "$raw/vllm.log" 2> /dev/null
  tar -C "$raw" -czf "$state/.files" . && mv "$state/.files" "$out/files.tar.gz"
  python3 bench/gpu/two_report.py "$state/runs" --gpus "$raw/gpus.csv" --cpus "$raw/cpus.jsonl" --flips "$out/flips.json" ${1:-} \
    > "$state/.two" 2> "$raw/report.log" && mv "$state/.two" "$out/two.json"
}
end_launch() { # TERM, and KILL for what does not heed it
  [ -n "$launch" ] || return 0
  kill -TERM "$launch" 2> /dev/null
  for _ in $(seq 25); do kill -0 "$launch" 2> /dev/null || break; sleep 1; done
  kill -KILL -- "-$launch" 2> /dev/null
  wait "$launch" 2> /dev/null
  launch=
}
trap 'end_launch; kill $sampler $cores $reporter 2> /dev/null' EXIT

start_engine() { # $@: more flags
  CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=1 setsid nohup python3 -m vllm.entrypoints.cli.main serve "$model" \
    --served-model-name "$(basename "$model")" --host 127.0.0.1 --port 8000 --dtype bfloat16 --max-model-len 8192 \
    --max-num-seqs 256 --enable-lora --max-loras 6 --max-lora-rank 16 --logprobs-mode processed_logprobs \
    --generation-config vllm --enable-auto-tool-choice --tool-call-parser hermes --gpu-memory-utilization 0.5 --stream-interval 16 --disable-uvicorn-access-log "$@" \
    > "$state/vllm.log" 2>&1 < /dev/null &
  engine=$!
}
engine=${ENGINE_PID:-} tries=0
until curl -sf "$engine_url/health" > /dev/null; do
  if [ -z "$engine" ] || ! kill -0 "$engine" 2> /dev/null; then
    tail -30 "${ENGINE_LOG:-$state/vllm.log}" 2> /dev/null
    [ $tries -lt 2 ] || { log "vLLM died twice"; exit 1; }
    tries=$((tries + 1))
    log "starting vLLM, try $tries"
    if [ $tries = 1 ] && [ -z "${ENGINE_PID:-}" ]; then start_engine; else start_engine --enforce-eager; fi
  fi
  [ $SECONDS -lt "$limit" ] || { log "vLLM is not up"; exit 124; }
  sleep 0.5
done
log "vLLM up"

sandbox=bubblewrap
bwrap --unshare-all --ro-bind / / --proc /proc true 2> /dev/null || sandbox=process
log "sandbox: $sandbox"

common=(model="$model" engine.url="$engine_url" out="$state/runs" run.sandbox=$sandbox)
if [ -n "${RENDER_URL:-}" ]; then
  curl -sf "$RENDER_URL/health" > /dev/null && common+=("gateway.extra_args=[--render, $RENDER_URL]")
  log "render server: ${common[4]:-none, $RENDER_URL does not answer}"
fi
launch_as() { # NAME [overrides]: in a session of its own
  CUDA_VISIBLE_DEVICES=${TRAINER_GPU:-1} setsid python3 launch.py "${TWO_CONFIG:-examples/two.yaml}" name="$1" \
    "${common[@]}" "${@:2}" > "$raw/$1.launch.log" 2>&1 < /dev/null &
  launch=$!
}
made=$state/adapter
if [ -z "$adapter" ] && [ -n "${DEMONSTRATIONS:-}" ] && [ ! -d "$made" ]; then
  launch_as warm warm_start.demonstrations.limit="$DEMONSTRATIONS" warm_start.sft.learning_rate=2.0e-4 \
    warm_start.sft.epochs=3 warm_start.sft.rows_per_step=8
  # its trainer's settings are written when the adapter is there
  while kill -0 "$launch" 2> /dev/null && ! ls "$state"/runs/warm-*/trainer.yaml > /dev/null 2>&1; do
    [ $SECONDS -lt $((limit - 60)) ] || break
    sleep 0.3
  done
  end_launch
  tail -n 6 "$raw/warm.launch.log" | cut -c 1-600
  grep ALARM "$raw/warm.launch.log" | tee -a "$out/two.log"
  cp -r "$state"/runs/warm-*/warm_start/adapter "$made" || { report; log "no adapter was made"; exit 1; }
  cp "$state"/runs/warm-*/warm_start/*.json "$raw/" 2> /dev/null
  log "adapter made"
fi
[ -n "$adapter" ] || [ ! -d "$made" ] || adapter=$made

if [ -z "${SKIP_FLIPS:-}" ] && [ -n "$adapter" ]; then
  timeout -k 5 "${FLIPS_S:-75}" python3 bench/flips.py --engine "$engine_url" --adapter "$adapter" \
    --limit-s $((${FLIPS_S:-75} - 15)) --out "$out/flips.json" ${FLIPS_ARGS:-} > "$raw/flips.log" 2>&1
  log "flips ended with status $?"
  tail -n 1 "$raw/flips.log" | cut -c 1-3000
fi

words=("$@")
[ -z "$adapter" ] || words+=(warm_start.adapter="$adapter")
schedules=(${ORDER-async sync})
[ ${#schedules[@]} = 0 ] || window=$(((limit - SECONDS - ${HELDOUT_S:-0} - ${SPARE_S:-30}) / ${#schedules[@]} - ${START_S:-40}))
[ "${window:=0}" -le "${WINDOW_S:-150}" ] || window=${WINDOW_S:-150}
log "windows of $window s"
for schedule in "${schedules[@]}"; do
  more=()
  [ $schedule = async ] || more=("${sync_words[@]}")
  before=$(ls -d "$state/runs/$schedule"-*/ 2> /dev/null | tail -n 1)
  launch_as $schedule schedule=$schedule "${words[@]}" "${more[@]}"
  run= began= told=0
  while kill -0 "$launch" 2> /dev/null && [ $SECONDS -lt $((limit - 15)) ]; do
    [ -n "$run" ] || run=$(ls -d "$state/runs/$schedule"-*/ 2> /dev/null | tail -n 1)
    [ "$run" != "$before" ] || run=
    if [ -z "$began" ] && [ -n "$run" ] && [ -e "${run}runner.yaml" ]; then
      began=$SECONDS
      log "$schedule: agents begin"
    fi
    [ -z "$began" ] || [ $((SECONDS - began)) -lt "$window" ] || break
    if [ -n "$run" ] && [ $((SECONDS - told)) -ge 20 ]; then
      told=$SECONDS
      kill -0 "$reporter" 2> /dev/null || { report --quick & reporter=$!; }
    fi
    sleep 0.5
  done
  log "$schedule: ending"
  [ -z "$run" ] || date +%s.%N > "${run}told_to_end_s"
  end_launch
  tail -n 4 "$raw/$schedule.launch.log" | cut -c 1-600
  curl -sf "$engine_url/health" > /dev/null || { log "vLLM is gone"; tail -30 "${ENGINE_LOG:-$state/vllm.log}"; break; }
  [ $SECONDS -lt $((limit - 30)) ] || break
done
kill $sampler $cores 2> /dev/null
wait "$reporter" 2> /dev/null
report
if [ -n "${HELDOUT_S:-}" ] && [ -n "$adapter" ]; then
  judged=(--adapter start="$adapter")
  for run in $(ls -dtr "$state"/runs/{async,sync}-*/ 2> /dev/null); do # a second call's runs behind the first one's
    folder=$(ls -dt "$run"adapters/step-* 2> /dev/null | head -n 1)
    [ -z "$folder" ] || judged+=(--adapter "$(basename "$run")=$folder")
  done
  log "held-out: ${judged[*]}"
  left=$((limit - SECONDS - 10))
  python3 bench/gpu/heldout.py "$state/heldout" --engine "$engine_url" --run "${TWO_CONFIG:-examples/two.yaml}" \
    --sandbox $sandbox --limit-s $((left < HELDOUT_S ? left : HELDOUT_S)) "${judged[@]}" \
    > "$state/.heldout" 2> "$raw/heldout.log" && mv "$state/.heldout" "$out/heldout.json"
  cp "$state/heldout/evals.jsonl" "$raw/" 2> /dev/null
  report
  grep -n '"rate"\|"difference"' "$out/heldout.json" | head -40
fi
cat "$out/two.json" || tail -5 "$raw/report.log"
log "done"
