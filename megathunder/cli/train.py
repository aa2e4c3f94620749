"""Train a policy: rollouts by SGLang servers, rewards from sandboxed tasks, learning by Megatron-Core.

    torchrun --nproc-per-node N tools/train.py --config examples/shell_grpo.toml [--section.key VALUE ...]
    python tools/train.py --config examples/shell_grpo.toml          one learner rank, without torchrun

Exit status: 0 done, 1 the run failed, 2 the configuration is invalid, 130 interrupted.
`--plan` prints the plan and stops: it needs no GPU and no weights, a folder with the model's config.json will do.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path

from rich.console import Console

from megathunder.checkpoint.resume import find_resumption, nothing_to_resume
from megathunder.config import Config
from megathunder.config.checks import check, check_plan, notes
from megathunder.config.hub import resolve_models
from megathunder.config.load import load_config
from megathunder.config.model_shape import read_model_shape
from megathunder.errors import InfrastructureFailure, UserError
from megathunder.launch import Ranks, run_rank, wait_for_rank_0_error
from megathunder.metrics.run_folder import RunFolder, resume_run, start_run
from megathunder.objectives.build_objective import build_objective
from megathunder.planning.budget import check_memory_fits
from megathunder.planning.memory import gpu_use, host_limit_bytes
from megathunder.planning.plan import Plan, make_plan, plan_table
from megathunder.process_exit import describe_os_error, end_on_signals, print_error, report_to_torchrun
from megathunder.rendezvous import Refused, Rendezvous
from megathunder.rollout.agents.check_user_code import check_user_code


def main(argv: list[str]) -> int:
    """Check, show the plan, and run this rank."""
    ranks = Ranks.from_environment()
    if "--plan" in argv:
        return plan([a for a in argv if a != "--plan"], ranks)
    try:
        meeting = Rendezvous.join() if ranks.world > 1 else None
        return join(argv, ranks, meeting) if meeting and ranks.rank else lead(argv, ranks, meeting)
    except InfrastructureFailure as error:
        print_error(str(error))
        return 1


def plan(argv: list[str], ranks: Ranks) -> int:
    """Print what a run would do and hold."""
    try:
        config = resolve_models(load_config(argv), weights=False)
        meant = config.hardware.learner_ranks or ranks.world
        check_plan(config, ranks=meant)
        show_plan(config, meant)
    except UserError as error:
        print_error(str(error))
        return 2
    return 0


def lead(argv: list[str], ranks: Ranks, meeting: Rendezvous | None) -> int:
    """Rank 0: check, make the run folder, tell the other ranks, run. Whatever ends it before, they are told so."""
    folder, said = Path(), ""
    try:
        asked = load_config(argv)
        folder = Path(asked.run.folder).absolute() / asked.run.name
        check_plan(resolve_models(asked, weights=False), ranks=ranks.world)
        config = resolve_models(asked)
        check(config)
        check_user_code(config)
        build_objective(config)  # refuses a release that cannot be exact
        first_update = resumed_update(config, RunFolder(folder)) if config.run.resume else 0
        check_memory_fits(show_plan(config, ranks.world, ranks.local_world))
        resume_run(start_run(config), first_update)
        end_on_signals(folder)
        if meeting:
            placed = dataclasses.replace(asked.run, folder=str(folder.parent))
            meeting.tell(dataclasses.replace(asked, run=placed), argv)
        return run_rank(config, folder, meeting=meeting)
    except UserError as error:
        said = str(error)
        print_error(said)
        return 2
    except OSError as error:  # of what is done before there are processes
        said = describe_os_error(error, folder, "then start again")
        print_error(said)
        return 1
    except SystemExit as end:
        if end.code:
            said = "a word of the command line is wrong; the lines above the summary name it"
            report_to_torchrun(f"error: {said}")
        raise
    finally:
        if meeting and not meeting.told:
            meeting.refuse(said)


def join(argv: list[str], ranks: Ranks, meeting: Rendezvous) -> int:
    """Another rank: the settings are rank 0's, and so is the first word of what is wrong with them."""
    try:
        config, remark = meeting.hear(argv)
        if remark and not ranks.local_rank:
            print(f"note: {remark}", file=sys.stderr)
        return run_rank(resolve_models(config), Path(config.run.folder) / config.run.name, meeting=meeting)
    except Refused as refusal:
        if ranks.machine and not ranks.local_rank:  # on its own machine rank 0 has said so
            print_error(str(refusal))
            return 2
    except UserError as error:
        if ranks.machine and not ranks.local_rank:
            print_error(str(error))
            return 2
    return wait_for_rank_0_error()


def resumed_update(config: Config, folder: RunFolder) -> int:
    """The first update to take, by the newest complete checkpoint; raises ConfigError where there is none to go on
    from, or if `config` does not fit it."""
    found = find_resumption(config, folder.checkpoints)
    if found is None:
        raise nothing_to_resume(folder.path)
    print(f"note: resuming {found.folder}: {found.state.update} updates are done")
    for change in found.changed:
        print(f"note: changed from update {found.state.update} on: {change}")
    return found.state.update


def show_plan(config: Config, ranks: int, ranks_here: int = 0) -> Plan:
    """Print what the run will do and hold, and remarks on settings that may not do what was meant."""
    console = Console(highlight=False)
    shape, gpu = read_model_shape(config.learner.model), gpu_use()
    limits = {"host_limit_bytes": host_limit_bytes(), "gpu_bytes": gpu.limit_bytes if gpu else 0}
    plan = make_plan(config, shape, ranks=ranks, ranks_here=ranks_here, **limits)
    console.print(plan_table(plan))
    for note in notes(config):
        console.print(f"note: {note}")
    return plan


def run(argv: list[str]) -> int:
    """As a command: `--help | head` ends like any other filter's input."""
    if {"--help", "-h", "--plan"} & set(argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    return main(argv)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
