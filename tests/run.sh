#!/usr/bin/env bash
# Set up and run all tests. Arguments go to pytest: `bash tests/run.sh tests/unit -k ledger`.
#
# Without arguments the tests run in pieces, each a pytest of its own, as many at a time as there are cores (four at
# most), the longest first; a piece's output is shown when it ends.
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
declare -A running=() log=() # process -> its piece, its output
started=0 failed=()
trap 'kill "${!running[@]}" 2>/dev/null || true; rm -rf "$logs"' EXIT

start() { # piece
    local arguments output="$logs/$((++started))"
    read -ra arguments <<<"$1"
    .venv/bin/python -m pytest "${arguments[@]}" >"$output" 2>&1 &
    running[$!]=$1 log[$!]=$output
}

finish() { # one of those that run
    local ended status=0
    wait -n -p ended "${!running[@]}" || status=$?
    echo "=== $SECONDS s: ${running[$ended]}"
    cat "${log[$ended]}"
    [ "$status" = 0 ] || failed+=("${running[$ended]}")
    unset "running[$ended]"
}

for piece in "${pieces[@]}"; do
    [ "${#running[@]}" -lt "$at_once" ] || finish
    start "$piece"
done
while [ "${#running[@]}" -gt 0 ]; do finish; done
if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
echo "all tests passed"
