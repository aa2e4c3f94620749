#!/usr/bin/env bash
# Set up and run all tests. Arguments go to pytest: `bash tests/run.sh tests/unit -k ledger`.
#
# Without arguments the tests run in pieces, each a pytest of its own, as many at a time as there are cores (four at
# most), the longest first; a piece's output is shown when it ends. What failed runs once more at the end, with nothing
# beside it: real processes have real time limits, which a machine that stands still for seconds breaks. What passes then
# is named, and what fails again has failed.
set -euo pipefail
cd "$(dirname "$0")/.."
MEGATHUNDER_BROWSER=1 bash tools/setup.sh
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi

integration() { printf 'tests/integration/test_%s.py ' "$@"; }

runs=$(integration faults server_deaths two_machines server_machine)
servers=$(integration parallel_layouts mini_swe_agent publication_adapters publication_families publication)
sandboxes=$(integration sandbox_attacks reward_hacks remote_sandboxes docker_sandbox grading agent_repository)
read -ra elsewhere <<<"$runs $servers $sandboxes"
rest="tests/integration tests/gpu ${elsewhere[*]/#/--ignore=}"
pieces=("$runs" "$servers" tests/equality "$rest" "$sandboxes" "tests/unit $(echo tests/test_*.py)")
at_once=$(env -u OMP_NUM_THREADS nproc) # which would count threads
[ "$at_once" -le 4 ] || at_once=4

logs=$(mktemp -d)
declare -A running=() number=() # process -> its piece, its number
started=0 failed=() again=()
trap 'kill "${!running[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT

tests() { # number of a piece, arguments
    .venv/bin/python -m pytest -o cache_dir="$logs/cache$1" "${@:2}"
}

start() { # piece
    local arguments
    read -ra arguments <<<"$1"
    started=$((started + 1))
    tests "$started" "${arguments[@]}" >"$logs/$started" 2>&1 &
    running[$!]=$1 number[$!]=$started
}

finish() { # one of those that run
    local ended status=0
    wait -n -p ended "${!running[@]}" || status=$?
    echo "=== $SECONDS s: ${running[$ended]}"
    cat "$logs/${number[$ended]}"
    case $status in
        0) ;;
        1) again+=("${number[$ended]} ${running[$ended]}") ;; # tests failed
        *) failed+=("${running[$ended]}") ;;                  # pytest did
    esac
    unset "running[$ended]"
}

for piece in "${pieces[@]}"; do
    [ "${#running[@]}" -lt "$at_once" ] || finish
    start "$piece"
done
while [ "${#running[@]}" -gt 0 ]; do finish; done
for piece in "${again[@]}"; do
    read -ra arguments <<<"$piece"
    echo "=== $SECONDS s: what failed, once more, alone: ${piece#* }"
    if tests "${arguments[@]}" --last-failed --last-failed-no-failures none -rA; then
        echo "passed only when run again: the PASSED lines above"
    else
        failed+=("${piece#* }")
    fi
done
if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "all tests passed"
