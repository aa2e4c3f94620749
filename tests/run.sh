#!/usr/bin/env bash
# Set up and run all tests. Arguments go to pytest: `bash tests/run.sh tests/unit -k ledger`.
#
# Without arguments unit tests run beside those of equality, which keep one core busy each; then those of whole runs,
# servers and sandboxes, some of which measure time, by themselves. The statistics of drafted sampling take two minutes
# more and run where they are asked for: `bash tests/run.sh tests/integration/test_speculation.py`.
set -euo pipefail
cd "$(dirname "$0")/.."
MEGATHUNDER_BROWSER=1 bash tools/setup.sh
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
log=$(mktemp)
.venv/bin/python -m pytest tests/unit tests/test_*.py >"$log" 2>&1 &
unit=$!
trap 'kill "$unit" 2>/dev/null || true; rm -f "$log"' EXIT
failed=""
.venv/bin/python -m pytest tests/equality || failed="$failed equality"
wait "$unit" || failed="$failed unit"
cat "$log"
.venv/bin/python -m pytest tests/integration tests/gpu --ignore tests/integration/test_speculation.py || failed="$failed integration"
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
echo "all tests passed"
