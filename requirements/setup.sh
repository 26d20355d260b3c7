#!/usr/bin/env bash
# Make .venv: the CPU build of torch, the pinned lock, then this repository (editable). Does nothing when nothing changed.
#   requirements/setup.sh            what running needs
#   requirements/setup.sh --tests    and what the tests need (Chromium for the browser tests, dockerd, a kernel)
# Settings, all optional:
#   PYTHON                 the interpreter to build with (3.11 or newer; searched for when unset)
#   TURNGATE_VENV          where the environment goes (.venv)
#   TURNGATE_TORCH_INDEX   PyTorch's own CPU wheel index, where pip does not find the CPU build of torch by itself
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH="2.13.0+cpu"
UV="0.13.9"
LOCK="requirements/cpu.lock"
VENV="${TURNGATE_VENV:-.venv}"
STAMP="$VENV/turngate-setup"

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# system_package CHECK PACKAGES WHY: installs with apt-get as root, else says what to type.
system_package() {
  local check="$1" package="$2" why="$3"
  if eval "$check" >/dev/null 2>&1; then return 0; fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $package ($why)"
    # A list of packages that is missing or stale makes the first try fail; only the second counts.
    apt_install $package || { apt-get update -q >&2 && apt_install $package; } || fail "apt-get could not install $package"
    return 0
  fi
  fail "$package is missing ($why); install it, for example: sudo apt-get install $package"
}
# RUNLEVEL: a package that brings a daemon does not start it.
apt_install() { RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >&2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 /usr/bin/python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  return 1
}

install_torch() {
  if "$VENV/bin/python" -c "import torch, sys; sys.exit(torch.__version__ != '$TORCH')" 2>/dev/null; then return 0; fi
  say "installing torch $TORCH"
  if "$VENV/bin/python" -m pip install --quiet --no-deps "torch==$TORCH" \
    ${TURNGATE_TORCH_INDEX:+--extra-index-url "$TURNGATE_TORCH_INDEX"}; then return 0; fi
  if [ -n "${TURNGATE_TORCH_INDEX:-}" ]; then
    fail "torch $TORCH was not found there either; pip's reason stands above (TURNGATE_TORCH_INDEX=$TURNGATE_TORCH_INDEX)"
  fi
  fail "pip finds no torch $TORCH by itself. PyTorch publishes its CPU builds on a wheel index of its own: the address
  that its 'Get started' page shows after --index-url for Linux, pip, CPU. Set TURNGATE_TORCH_INDEX to that address:
  TURNGATE_TORCH_INDEX=ADDRESS make setup"
}

install_lock() {
  say "installing $(grep -c '==' "$LOCK") pinned packages"
  # uv is many times faster, but does not read pip's configuration: where it finds no index, pip does the same work.
  if "$VENV/bin/python" -m pip install --quiet "uv==$UV" &&
    VIRTUAL_ENV="$PWD/$VENV" "$VENV/bin/uv" pip install --quiet --no-deps -r "$LOCK"; then return 0; fi
  say "uv could not (its reason stands above); installing with pip"
  "$VENV/bin/python" -m pip install --quiet --no-deps -r "$LOCK"
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || fail "the CPU lock is for Linux on x86-64, this is $(uname -s) on $(uname -m)"
PY="$(find_python)" || {
  system_package false "python3 python3-venv" "a Python of 3.11 or newer with venv"
  PY="$(find_python)" || fail "this system's Python is older than 3.11; install a newer one and set PYTHON to it"
}
system_package "command -v bwrap" bubblewrap "the sandbox that agents run in"
system_package "ldconfig -p | grep -q libnuma.so.1" libnuma1 "vLLM's CPU build links to it"
if [ "${1:-}" = --tests ]; then
  system_package "command -v dockerd" docker.io "tests of the sandbox docker start a daemon of their own"
  system_package "command -v linux.uml" user-mode-linux "tests of limits boot a kernel of their own, with cgroup v2"
  system_package "command -v chromium || command -v chromium-browser || command -v google-chrome" chromium "browser tests"
fi

want="$(cat "$LOCK" requirements/setup.sh pyproject.toml | sha256sum | cut -d' ' -f1) $("$PY" --version)"
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$want" ] && "$VENV/bin/python" -c '' 2>/dev/null; then exit 0; fi
if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
  say "making $VENV with $("$PY" --version)"
  "$PY" -m venv --clear "$VENV"
fi
install_torch
install_lock
"$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation -e .
say "checking that it imports"
"$VENV/bin/python" -W ignore -c 'import torch, transformers, peft, trl, vllm, turngate.proxy.cli, turngate.trainer.models'
printf '%s\n' "$want" >"$STAMP"
say "ready: . $VENV/bin/activate, or call $VENV/bin/turngate"
