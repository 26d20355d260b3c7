#!/usr/bin/env bash
# All figures of the gateway in one go, about 12 minutes on 2 quiet cores: bench/results/gateway_*.json. Scaling
# with its processes needs 16 cores.
# Run it with nothing else running: overheads are then the gateway's own. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
results=${RESULTS:-bench/results}
mkdir -p "$results"

run() { # name, arguments
  local name=$1
  shift
  echo "== $name: $*"
  "$python" "$@" --out "$results/gateway_$name.json" | tail -n 1
}

[ "$(nproc)" -lt 16 ] || run workers bench/gateway.py --workers 1,2,4 --sessions 400 --tokens-per-s 800 --engines 6 \
  --load-processes 7
run short bench/gateway.py --shape short --idle 500 --peer openenv
run short_no_interval bench/gateway.py --shape short --no-interval
run long bench/gateway.py --shape long --peer openenv
run huge bench/gateway.py --shape huge
run engine_cost bench/engine_cost.py
