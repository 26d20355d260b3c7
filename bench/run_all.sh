#!/usr/bin/env bash
# All figures of the gateway in one go, about 12 minutes on 2 quiet cores: bench/results/gateway_*.json.
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

run short bench/gateway.py --shape short --workers 1,2 --idle 500 --peer openenv
run short_no_interval bench/gateway.py --shape short --no-interval
run long bench/gateway.py --shape long --peer openenv
run huge bench/gateway.py --shape huge
run engine_cost bench/engine_cost.py
