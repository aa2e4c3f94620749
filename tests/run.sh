#!/usr/bin/env bash
# Set up and run all tests. Arguments go to pytest: `bash tests/run.sh tests/unit -k ledger`.
#
# Without arguments two runs go side by side, one a core: unit tests and equality, each with tests of real servers that
# measure no time. Then the rest by itself: faults, sandboxes under attack, several machines. The statistics of drafted
# sampling take two minutes more and run where asked for: `bash tests/run.sh tests/integration/test_speculation.py`.
set -euo pipefail
cd "$(dirname "$0")/.."
MEGATHUNDER_BROWSER=1 bash tools/setup.sh
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
beside_unit=(tests/integration/test_{publication,publication_adapters,publication_families,docker_sandbox,grading}.py)
beside_equality=(tests/integration/test_{mini_swe_agent,sglang,report_in_browser,prepared_data,evaluate}.py)
asked_for=tests/integration/test_speculation.py
log=$(mktemp)
.venv/bin/python -m pytest tests/unit tests/test_*.py "${beside_unit[@]}" >"$log" 2>&1 &
unit=$!
trap 'kill "$unit" 2>/dev/null || true; rm -f "$log"' EXIT
failed=""
.venv/bin/python -m pytest tests/equality "${beside_equality[@]}" || failed="$failed equality"
wait "$unit" || failed="$failed unit"
cat "$log"
done_already=("${beside_unit[@]/#/--ignore=}" "${beside_equality[@]/#/--ignore=}" "--ignore=$asked_for")
.venv/bin/python -m pytest tests/integration tests/gpu "${done_already[@]}" || failed="$failed integration"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
echo "all tests passed"
