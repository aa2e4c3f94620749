#!/usr/bin/env python
"""Run schedules in blocks within one job, or a recorded run: `alternating.py --alternation FILE --config FILE [...]`.

Started by tools/compare.py and tools/replay.py, under torchrun where there are several learner ranks. The launch, the
coordinator and the learner are those of a training run; what differs is the plan of updates, where trajectories come
from, and that tensors may be kept (`benchmarks/comparison/`). Exit status as of tools/train.py.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megathunder.errors import UserError
from megathunder.process_exit import describe_os_error, end_on_signals, print_error

if __name__ == "__main__":
    end_on_signals()  # importing the rest takes a second or two

from benchmarks.comparison.alternation import FILE, AlternatingUpdates, Alternation, read_alternation
from benchmarks.comparison.tensor_recorder import TensorRecorder
from megathunder.config import Config
from megathunder.config.checks import check
from megathunder.config.hub import resolve_models
from megathunder.config.load import load_config
from megathunder.config.model_shape import read_model_shape
from megathunder.launch import Ranks, run_rank, wait_for_rank_0_error
from megathunder.metrics.run_folder import start_run
from megathunder.objectives.build_objective import build_objective
from megathunder.planning.budget import check_memory_fits
from megathunder.planning.memory import gpu_use, host_limit_bytes
from megathunder.planning.plan import make_plan

COORDINATOR = (str(Path(__file__).resolve().parent / "comparison" / "coordinator_process.py"),)


def main(argv: list[str], *, coordinator: Sequence[str] = COORDINATOR) -> int:
    """Check and run this rank; the exit status. `coordinator`: another program for it, as words for Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alternation", type=Path, required=True)
    options, rest = parser.parse_known_args(argv)
    ranks, folder = Ranks.from_environment(), Path()
    try:
        alternation = read_alternation(options.alternation)
        config = resolve_models(load_config(rest))
        folder = Path(config.run.folder) / config.run.name
        if ranks.rank == 0:
            begin(config, alternation, ranks)
            end_on_signals(folder)
        observer = TensorRecorder(folder, alternation.keep) if alternation.keep and ranks.rank == 0 else None
        return run_rank(alternation.applied(config), folder, coordinator_program=coordinator, observer=observer)
    except UserError as error:
        if ranks.rank:
            wait_for_rank_0_error()
        print_error(str(error))
        return 2
    except OSError as error:
        if ranks.rank:
            return wait_for_rank_0_error()
        print_error(describe_os_error(error, folder, "then start again"))
        return 1


def begin(config: Config, alternation: Alternation, ranks: Ranks) -> None:
    """Refuse what cannot run, and make the run folder."""
    samples = alternation.recording is None
    plan = AlternatingUpdates(config, alternation)
    for number in range(max(len(alternation.schedules), 1)):
        settings = plan.spec(number * alternation.block).config
        check(settings, samples=samples)
        build_objective(settings)
    limits = {"host_limit_bytes": host_limit_bytes(), "gpu_bytes": gpu.limit_bytes if (gpu := gpu_use()) else 0}
    shape = read_model_shape(config.learner.model)
    check_memory_fits(
        make_plan(config, shape, ranks=ranks.world, ranks_here=ranks.local_world, samples=samples, **limits)
    )
    folder = start_run(config).path
    for kind in ("gradients", "weights"):
        shutil.rmtree(folder / kind, ignore_errors=True)
    alternation.write(folder / FILE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
