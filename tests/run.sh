#!/usr/bin/env bash
# Set up and run all tests. Arguments go to pytest: `bash tests/run.sh tests/unit -k ledger`.
set -euo pipefail
cd "$(dirname "$0")/.."
MEGATHUNDER_BROWSER=1 bash tools/setup.sh
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
exec .venv/bin/python -m pytest tests
