#!/usr/bin/env bash
# What the gateway costs, on a machine of many cores without a network, in one command: scaling with its processes, the
# long, short and huge shapes, idle sessions, and the long shape beside OpenEnv's proxy. No accelerator is used.
#
#   TOKENIZER=FOLDER bench/gpu/gateway.sh OUT_FOLDER
#
# FOLDER holds tokenizer.json, tokenizer_config.json and the chat template of Qwen2.5-Coder. OUT_FOLDER gets NAME.json of
# each part as soon as it is there, and gateway.log with each single run's line, so a cut leaves what was done. LIMIT_S
# (580) bounds the whole call, each part has a limit of its own and is left out where too little time is left. PARTS:
# some of workers, long, short, huge, idle, peer. SMALL=1: a few turns of each, to see that all runs. The peer needs
# OpenEnv (bench/peer_openenv.py) importable by OPENENV_PYTHON (python3), and is left out without it. STORE: a folder on
# a disk.
set -uo pipefail
out=$1 tokenizer=${TOKENIZER:?names a folder: see above}
limit=${LIMIT_S:-580}
here=$(cd "$(dirname "$0")/../.." && pwd)
state=${GATEWAY_STATE:-/tmp/turngate-gateway}
mkdir -p "$out" "$state/path/turngate" "${STORE:-$state/store}"
for part in proxy trainer harnesses tasks; do ln -sfn "$here/$part" "$state/path/turngate/$part"; done
export PYTHONPATH="$state/path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
ulimit -n "$(ulimit -Hn)"
cd "$here" || exit 1
log() { echo "[$SECONDS s] $*" | tee -a "$out/gateway.log"; }
log "$(nproc) cores, $(grep -m 1 'model name' /proc/cpuinfo | cut -d : -f 2), $(python3 --version), load $(cut -d ' ' -f 1-3 /proc/loadavg)"

run() { # name, its own limit in s, at least so many s, arguments of bench/gateway.py
  local name=$1 own=$2 least=$3 left=$((limit - SECONDS)) status
  shift 3
  case " ${PARTS:-workers long short huge idle peer} " in *" $name "*) ;; *) return 0 ;; esac
  [ "$left" -ge "$least" ] || { log "$name: left out, $left s are too few"; return 0; }
  [ "$own" -le "$left" ] || own=$left
  log "$name: $*"
  timeout -k 10 "$own" python3 "$@" --tokenizer "$tokenizer" > "$state/$name.out" 2> "$state/$name.err"
  status=$?
  cat "$state/$name.out" >> "$out/gateway.log"
  if [ $status = 0 ]; then
    tail -n 1 "$state/$name.out" > "$out/$name.json"
    tail -n 1 "$state/$name.out" | cut -c 1-2500
  else
    tail -n 20 "$state/$name.err" | tee -a "$out/gateway.log"
  fi
  log "$name: ended with status $status"
}
gateway() { # name, limits, arguments
  local name=$1 own=$2 least=$3
  shift 3
  run "$name" "$own" "$least" bench/gateway.py --folder "${STORE:-$state/store}" "$@"
}

if [ -n "${SMALL:-}" ]; then
  of=(--sessions 4 --turns 3) many=(--sessions 8 --turns 3 --engines 2 --load-processes 2) workers=1,2 idle=20
else
  of=() many=(--sessions 400 --engines 6 --load-processes 7) workers=1,2,4 idle=500
fi
gateway workers 170 60 --workers "$workers" --tokens-per-s 800 "${many[@]}"
gateway long 150 100 --shape long "${of[@]}"
gateway short 90 55 --shape short "${of[@]}"
gateway huge 110 30 --shape huge "${of[@]}"
run idle 60 20 bench/idle_sessions.py --sessions "$idle" --workers 2
export OPENENV_PYTHON=${OPENENV_PYTHON:-python3}
if "$OPENENV_PYTHON" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("openenv"))'; then
  # The short shape is what fits where the time for the long one, twice, is gone.
  shape=long
  [ $((limit - SECONDS)) -ge 215 ] || shape=short
  gateway peer 290 100 --shape $shape --peer openenv "${of[@]}"
else
  log "peer: left out, $OPENENV_PYTHON has no openenv"
fi
log "done"
