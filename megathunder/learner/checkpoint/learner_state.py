"""The learner's state on disk: weights, optimizer and counters, independent of the parallel layout where Megatron is.

    folder/   Megatron's distributed checkpoint (every rank writes its shards) + learner.json (rank 0)
              + generators_<rank>.json (every rank)

Of a model with low-rank adapters they alone are written: the rest is the folder that the run started from.

Called by `Learner.save` and `Learner.load`; every rank of the job takes part. A save may write in the background
(`Saving.start`), from a copy; the learner meets again for `finish`. Who names folders, makes them atomic and
keeps the newest is the checkpoint room. Refuses a folder without `learner.json`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megathunder.errors import MegathunderError, UserError
from megathunder.learner.checkpoint.rng_state import load_generators, save_generators
from megathunder.learner.checkpoint.snapshot import Snapshot
from megathunder.learner.model.weights.local import ADAPTER
from megathunder.learner.optimizer import Stepper

SCALES = "_extra_state"  # of a Transformer Engine layer


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What is not a tensor. `policy_version` is the last one trained on (-1: none)."""

    updates_done: int
    steps_taken: int
    bad_in_a_row: int
    policy_version: int
    optimizers: int = 0  # two where expert parallelism keeps that of the experts apart; 0: not noted


class Saving:
    """A checkpoint that is being saved; every rank of the job makes one at the same time. `write` or `start`, then
    `finish`."""

    def __init__(
        self, folder: Path, chunks: Sequence[DistributedDataParallel], stepper: Stepper, policy_version: int
    ) -> None:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        self._folder = folder
        _start_adam(stepper.optimizer)  # before the first step as well: a checkpoint always has what a load looks for
        self._snapshot = Snapshot(_sharded(chunks, stepper.optimizer), folder)
        save_generators(folder, dist.get_rank(), dist.get_world_size())
        self._counters = Counters(
            updates_done=stepper.updates_done,
            steps_taken=stepper.steps_taken,
            bad_in_a_row=stepper.bad_in_a_row,
            policy_version=policy_version,
            optimizers=len(_parts(stepper.optimizer)),
        )
        # From here on they may change: `start` copies what `write` reads.
        self.write, self.start = self._snapshot.write, self._snapshot.start

    def finish(self) -> None:
        """When every rank has written; the folder can be loaded from then on."""
        self._snapshot.finish()
        if dist.get_rank() == 0:
            (self._folder / "learner.json").write_bytes(msgspec.json.encode(self._counters))
        dist.barrier()


def save(folder: Path, chunks: Sequence[DistributedDataParallel], stepper: Stepper, policy_version: int) -> None:
    """Write this rank's part; returns when every rank has written."""
    saving = Saving(folder, chunks, stepper, policy_version)
    saving.write()
    saving.finish()


def load(folder: Path, chunks: Sequence[DistributedDataParallel], stepper: Stepper) -> Counters:
    """Restore weights, optimizer and counters from `folder`."""
    marker = folder / "learner.json"
    if not marker.is_file():
        raise UserError(
            f"{folder} holds no learner.json",
            expected="a folder that Learner.save completed",
            remedy="resume from another checkpoint, or start anew with run.overwrite=true",
        )
    counters = msgspec.json.decode(marker.read_bytes(), type=Counters)
    _check_optimizers(folder, counters, len(_parts(stepper.optimizer)))
    _start_adam(stepper.optimizer)
    with warnings.catch_warnings():  # of torch about the kind of tensor that Megatron stores
        warnings.simplefilter("ignore", FutureWarning)
        loaded = dist_checkpointing.load(_sharded(chunks, stepper.optimizer, loading=True), str(folder))
    with torch.no_grad():
        for index, chunk in enumerate(chunks):
            _load_model(chunk.module, loaded[f"model{index}"])
        _load_optimizer(stepper.optimizer, loaded["optimizer"])
    for part in _parts(stepper.optimizer):
        _set_step(part.optimizer, counters.steps_taken)
    stepper.updates_done, stepper.steps_taken = counters.updates_done, counters.steps_taken
    stepper.bad_in_a_row = counters.bad_in_a_row
    load_generators(folder, dist.get_rank(), dist.get_world_size())
    return counters


def _sharded(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, *, loading: bool = False
) -> dict[str, Any]:
    """Megatron's sharded state: one entry a model chunk, and the optimizer."""
    sharding = {"distrib_optim_sharding_type": "fully_reshardable"}
    state: dict[str, Any] = {
        f"model{index}": _kept(chunk.module.sharded_state_dict(metadata=sharding), fp8=bool(chunk.module.config.fp8))
        for index, chunk in enumerate(chunks)
    }
    models = state["model0"] if len(chunks) == 1 else {k: v for part in state.values() for k, v in part.items()}
    state["optimizer"] = optimizer.sharded_state_dict(models, is_loading=loading, metadata=sharding)
    return state


def _adapted(entries: dict[str, Any]) -> bool:
    return any(f".{ADAPTER}." in name for name in entries)


def _kept(entries: dict[str, Any], *, fp8: bool) -> dict[str, Any]:
    """The adapters where there are any, else everything; scales of Transformer Engine's layers where FP8 uses them, so
    that other layers may go on from the same checkpoint where it does not."""
    adapters = {name: entry for name, entry in entries.items() if f".{ADAPTER}." in name}
    return {name: entry for name, entry in (adapters or entries).items() if fp8 or SCALES not in name}


def _load_model(model: torch.nn.Module, entries: dict[str, Any]) -> None:
    """Put in what the checkpoint holds, which must be all that is trained."""
    found = model.load_state_dict(entries, strict=False)
    wrong = [name for name in (*found.missing_keys, *found.unexpected_keys) if SCALES not in name]
    if wrong and not _adapted(entries):
        raise MegathunderError(f"a checkpoint without, or with an unknown, {', '.join(wrong[:3])}")


def _check_optimizers(folder: Path, counters: Counters, here: int) -> None:
    """Megatron names the states of a mixture's optimizer otherwise where expert parallelism splits it in two."""
    if counters.optimizers not in (0, here):
        wanted = "1" if here > counters.optimizers else "more than 1"
        raise UserError(
            f"{folder} was saved with learner.expert_parallel = {wanted}, which this layout has not",
            expected="the same of the two: any layout without expert parallelism, or any with it",
            remedy=f"set learner.expert_parallel to {wanted}, or start anew from the run's exported policy",
        )


def _parts(optimizer: MegatronOptimizer) -> Sequence[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", None) or [optimizer]


def _load_optimizer(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """What Megatron's `load_state_dict` does, in two parts: its sharded optimizer takes every entry of Adam's state for
    a tensor that the checkpoint has, and the step is none."""
    parts = _parts(optimizer)
    states = [state] if len(parts) == 1 else [one for _, one in sorted(state.items())]
    for part, own in zip(parts, states, strict=True):
        tensors = own.pop("param_state", None) if isinstance(part, DistributedOptimizer) else None
        if not isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
            # Megatron leaves out a step of 0, without which torch reads no state.
            own.get("optimizer", own)["state"].setdefault("common_step", torch.tensor(0.0))
        part.load_state_dict(own)
        if tensors is not None:
            for moments in part.optimizer.state.values():
                moments.pop("step", None)
            part.load_parameter_state_from_fully_reshardable(tensors)


def _set_step(adam: torch.optim.Optimizer, steps: int) -> None:
    """Steps taken. The sharded optimizer does not restore torch's counter, and shares one tensor between parameters;
    the fused ones count a group at once."""
    if not isinstance(adam, torch.optim.Adam):
        for group in adam.param_groups:
            group["step"] = steps
        return
    for moments in adam.state.values():
        moments["step"] = torch.tensor(float(steps))


def _start_adam(optimizer: MegatronOptimizer) -> None:
    """Give Adam its (zero) moments before the first step, so that there is something to load into."""
    for part in _parts(optimizer):
        if part.init_state_fn is not None and part.optimizer is not None and not part.optimizer.state:
            part.init_state_fn(part.optimizer, part.config)
            _set_step(part.optimizer, 0)
