"""The learner of one rank: what the commands of the coordinator do.

    differentiate  forward and backward of a micro-batch into a named accumulator
    score          divergences from the reference, forward alone
    fold           closes a group: batch += coefficient * accumulator
    take_step      reduces, normalises, clips and steps once; the only collective over cells

    Learner(config, layout).differentiate(Differentiate(...)) -> WorkStats

Every rank of a cell carries out the same commands in the same order. An update trains tokens of one policy version:
its first command fixes the version, which must have grown since the last step that changed the weights; any other is a
StalePolicyError. Called by `worker.py`. Refuses what `packing`, `store` and `prefix` refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
from torch import Tensor

from megathunder.config.root import Config
from megathunder.errors import StalePolicyError
from megathunder.learner.accumulators.arithmetic import FixedPointArithmetic, FloatArithmetic
from megathunder.learner.accumulators.exact_reduce import reduce_exactly
from megathunder.learner.accumulators.host import HostArithmetic, HostTraffic
from megathunder.learner.accumulators.layout import GradientLayout, groups_of_buffers
from megathunder.learner.accumulators.shards import Shards
from megathunder.learner.accumulators.store import AccumulatorStore
from megathunder.learner.checkpoint import learner_state
from megathunder.learner.loss import TokenLoss
from megathunder.learner.model.adapter_files import export_adapter, save_adapter
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.bundle import DTYPES, ModelBundle
from megathunder.learner.model.weights import export_base, export_weights, save_hf
from megathunder.learner.observer import StepObserver
from megathunder.learner.optimizer import Stepper, wrap
from megathunder.learner.parallel import Layout
from megathunder.learner.passes.backward import Runner, WorkCounters
from megathunder.learner.passes.flop_cost import Price
from megathunder.learner.passes.gradient_runner import GradientRunner
from megathunder.learner.passes.logprobs import attach
from megathunder.learner.passes.pipeline import Pipeline
from megathunder.learner.passes.reference_policies import ReferencePolicies
from megathunder.learner.transport.cell import summed_over_cell
from megathunder.types import (
    Differentiate,
    ExportPolicy,
    FinishCheckpoint,
    Fold,
    LoadCheckpoint,
    SaveCheckpoint,
    Score,
    TakeStep,
    WorkStats,
)


class Learner:
    """See the module docstring. `bundle` takes a model that is already built; `observer` sees every step."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        bundle: ModelBundle | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        settings = self._settings = config.learner
        self.layout, self._observer = layout, observer
        self.bundle = bundle or build_model(settings, layout)
        for stage in self.bundle.stages:
            attach(stage, config.rollout.temperature)
        self._chunks = wrap(self.bundle, settings)
        gradients = GradientLayout(self._chunks)
        exact = settings.accumulator == "exact"
        on_host = settings.accumulator_placement == "host"
        self._traffic = None
        if on_host and not exact and layout.device.type == "cuda":
            self._traffic = HostTraffic(layout.device, gradients.homes[0].dtype)
        if self._traffic:
            self.arithmetic = HostArithmetic(gradients, self._traffic)
        else:
            self.arithmetic = (
                FixedPointArithmetic(gradients, settings.exact_range) if exact else FloatArithmetic(gradients)
            )
        shards = None
        if layout.shard_group:
            groups = groups_of_buffers(self._chunks, layout.shard_group, layout.expert_shard_group)
            shards = Shards(gradients, groups)
        self.store = AccumulatorStore(gradients, self.arithmetic, on_host=on_host, shards=shards)
        self.stepper = Stepper(self._chunks, gradients, settings, config.run.updates)
        dtype, transformer = DTYPES[settings.dtype], self.bundle.transformer_config
        self.runner = Runner(
            Pipeline(self._chunks, layout, transformer.hidden_size, dtype, token_share=self.bundle.token_share),
            TokenLoss.of(config),
            device=layout.device,
            dtype=dtype,
            pad_to=self.bundle.pad_to,
        )
        self.others = ReferencePolicies.of(config, gradients.parameters)
        self.release = GradientRunner(config, layout, self.runner, self.store, self.others)
        self._price = Price.of(transformer, self.bundle.vocab_size)
        self._version: int | None = None  # of the update in progress
        self._stale_below = -1
        self._saving: learner_state.Saving | None = None

    @property
    def local_parameters(self) -> int:
        """Parameters of this rank."""
        return self.bundle.local_parameters

    def differentiate(self, command: Differentiate) -> WorkStats:
        """Add the gradient of the command's rows to its target."""
        self._check_version(command.policy_version)
        counters = WorkCounters(self._price)
        self.release.differentiate(command, counters)
        return summed_over_cell(counters.stats(accumulator_bytes=self.store.bytes), self.layout)

    def score(self, command: Score) -> WorkStats:
        """How far each row's policy is from the reference, on the tokens it sampled."""
        self._check_version(command.policy_version)
        counters = WorkCounters(self._price)
        found = self.release.score(command.rows, counters)
        stats = msgspec.structs.replace(counters.stats(accumulator_bytes=self.store.bytes), divergences=found)
        return summed_over_cell(stats, self.layout)

    def fold(self, command: Fold) -> WorkStats:
        """Apply the closure of a group."""
        counters = WorkCounters(self._price)
        self.release.fold(command, counters)
        return summed_over_cell(counters.stats(accumulator_bytes=self.store.bytes), self.layout)

    def take_step(self, command: TakeStep) -> WorkStats:
        """The barrier: every rank of the job calls this once an update, whatever it differentiated."""
        counters = WorkCounters(self._price)
        self.release.finish(counters)
        if self.arithmetic.exact:
            reduce_exactly(self._chunks, self.store, self.arithmetic)
        else:
            self.stepper.reduce()
        gradients = self.store.layout
        if self._observer:
            views = gradients.home_views
            self._observer.gradient_reduced(command.update, gradients.names, views, command.normaliser)
        self.others.refresh_old_policy()
        result = self.stepper.step(command.normaliser, skip=command.skip)
        if self._observer:
            weights = [parameter.detach() for parameter in gradients.parameters]
            self._observer.weights_stepped(command.update, gradients.names, weights)
        self.store.clear()
        if result.stepped and self._version is not None:
            self._stale_below = self._version
        self._version = None
        return WorkStats(
            grad_norm=result.grad_norm,
            stepped=result.stepped,
            skip_reason=result.skip_reason,
            learning_rate=result.learning_rate,
            flops=counters.flops,
            replay_tokens=counters.replay_tokens,
            accumulator_bytes=self.store.bytes,
            prompt_tokens_saved=counters.prompt_tokens_saved,
            exposed_copy_s=self._traffic.exposed_s() if self._traffic else None,
            salt=counters.salt,
        )

    def abandon_update(self) -> None:
        """Drop everything an unfinished update has added."""
        self.release.clear()
        self.store.abandon()
        self._version = None

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) on the cell's leader; other ranks of the cell must exhaust it too."""
        return export_weights(self.bundle)

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """Likewise, of the frozen weights that adapters sit on."""
        return export_base(self.bundle)

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Likewise, of the adapters alone, under PEFT's names."""
        return export_adapter(self.bundle)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and counters; every rank of the job takes part (see `state`)."""
        learner_state.save(folder, self._chunks, self.stepper, self._stale_below)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        self._stale_below = learner_state.load(folder, self._chunks, self.stepper).policy_version
        self.others.refresh_old_policy()

    def save_checkpoint(self, command: SaveCheckpoint) -> WorkStats:
        """`save` as a command; in the background it answers once a copy is in host memory."""
        if not command.background:
            self.save(Path(command.folder))
            return WorkStats()
        self._saving = learner_state.Saving(Path(command.folder), self._chunks, self.stepper, self._stale_below)
        self._saving.start()
        return WorkStats()

    def finish_checkpoint(self, command: FinishCheckpoint) -> WorkStats:
        """Complete what a save in the background has written."""
        self._saving.finish()
        self._saving = None
        return WorkStats()

    def load_checkpoint(self, command: LoadCheckpoint) -> WorkStats:
        """`load` as a command."""
        self.load(Path(command.folder))
        return WorkStats()

    def export_policy(self, command: ExportPolicy) -> WorkStats:
        """Write a Hugging Face folder, adapters merged, and these alone in PEFT's format beside it as `adapter/`; every
        rank of the cell takes part."""
        save_hf(self.bundle, command.folder)
        if self.bundle.adapted:
            save_adapter(self.bundle, self._settings, Path(command.folder) / "adapter")
        return WorkStats()

    def gradients(self) -> list[tuple[str, Tensor]]:
        """(Megatron name, gradient) of the batch accumulator of this rank, not reduced (fp32 accumulator)."""
        return list(zip(self.store.layout.names, self.store.layout.home_views, strict=True))

    def _check_version(self, version: int) -> None:
        if self._version is None:
            if version <= self._stale_below:
                raise StalePolicyError(
                    f"tokens of policy version {version} after the step that ended version {self._stale_below}: "
                    "sample with the published weights, or choose schedule = one_step_off"
                )
            self._version = version
        if version != self._version:
            raise StalePolicyError(
                f"tokens of policy version {version} in an update of version {self._version}: zero stale tokens are "
                "allowed; check that every server acknowledged the last publication"
            )
