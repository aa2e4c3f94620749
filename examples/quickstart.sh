#!/usr/bin/env bash
# Set up and run the main job: a small policy learns multi-turn shell tasks on this machine's CPU.
#   bash examples/quickstart.sh                     GRPO (rewards)
#   bash examples/quickstart.sh --objective opd     on-policy distillation (a teacher)
# Further arguments are settings, e.g. --schedule sync --run.updates 10.
set -euo pipefail
cd "$(dirname "$0")/.."
bash tools/setup.sh
objective=grpo
arguments=("$@")
for ((i = 0; i < $#; i++)); do
  case "${arguments[i]}" in
    --objective) objective="${arguments[i + 1]:-}" ;;
    --objective=*) objective="${arguments[i]#*=}" ;;
  esac
done
case "$objective" in
  grpo | opd) ;;
  *) echo "quickstart: objective '$objective' is not known; expected grpo or opd" >&2; exit 2 ;;
esac
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/torchrun --nproc-per-node 1 tools/train.py --config "examples/shell_$objective.toml" \
  --run.name "quickstart_$objective" --run.overwrite True "$@"
