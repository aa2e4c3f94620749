"""Layouts: cells are what collectives couple, and what cannot run is refused before any group is built."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from megatron.core.parallel_state import RankGenerator

from examples.policies.build.tiny import make_tiny
from megathunder.config.layout_checks import check_ranks
from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError
from megathunder.learner.model.build_model import build_model
from megathunder.learner.parallel import choose_device, initialize, join_coupled


def test_one_process_is_one_cell_that_it_leads() -> None:
    layout = initialize(LearnerConfig(device="cpu"))
    assert (layout.cells, layout.cell_ranks, layout.leads_cell, layout.cell_replicas) == (1, (0,), True, 1)
    assert layout.is_first_stage and layout.is_last_stage


@pytest.mark.parametrize(
    ("groups", "cells"),
    [
        ([[0], [1]], [(0,), (1,)]),
        ([[0, 1], [0, 1], [2, 3], [2, 3]], [(0, 1), (2, 3)]),
        # tensor pairs (0,1) (2,3), experts tie 0 with 2 and 1 with 3
        ([[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]], [(0, 1, 2, 3)]),
        # joined only through a later group
        ([[0, 1], [2, 3], [1, 2]], [(0, 1, 2, 3)]),
    ],
)
def test_cells_are_connected_components(groups: list[list[int]], cells: list[tuple[int, ...]]) -> None:
    assert join_coupled(groups) == cells


def coupled(config: LearnerConfig, world: int) -> list[list[int]]:
    """The groups that share a collective in a forward pass, as Megatron-Core numbers the ranks."""
    order, stages = "tp-cp-ep-dp-pp", config.pipeline_parallel
    tensor, context, expert = config.tensor_parallel, config.context_parallel, config.expert_parallel
    expert_tensor = config.expert_tensor_parallel or tensor
    copies = world // (tensor * context * stages)
    dense = RankGenerator(tp=tensor, ep=1, dp=copies, pp=stages, cp=context, order=order)
    copies = world // (expert_tensor * expert * stages)
    experts = RankGenerator(tp=expert_tensor, ep=expert, dp=copies, pp=stages, cp=1, order=order)
    return [*dense.get_ranks("tp-cp"), *dense.get_ranks("pp"), *experts.get_ranks("tp-ep")]


@pytest.mark.parametrize(
    ("settings", "world", "ranks"),
    [
        ({}, 4, 1),
        ({"tensor_parallel": 4, "expert_parallel": 2, "expert_tensor_parallel": 1}, 8, 4),
        ({"tensor_parallel": 4, "expert_parallel": 16, "expert_tensor_parallel": 1}, 32, 16),
        ({"tensor_parallel": 2, "expert_parallel": 3, "expert_tensor_parallel": 1}, 12, 6),
        ({"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 6, "expert_tensor_parallel": 1}, 24, 12),
        ({"tensor_parallel": 3, "pipeline_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}, 24, 12),
        ({"context_parallel": 4, "expert_parallel": 2, "pipeline_parallel": 3}, 24, 12),
    ],
)
def test_a_cell_has_as_many_ranks_as_megatron_couples(settings: dict[str, int], world: int, ranks: int) -> None:
    config = LearnerConfig(**settings)
    cells = join_coupled(coupled(config, world))
    assert {len(cell) for cell in cells} == {config.ranks_of_a_cell} == {ranks}
    assert len(cells) == world // ranks


@pytest.mark.parametrize(
    ("settings", "world", "complaint"),
    [
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, 6, "6 learner rank"),
        ({"expert_parallel": 3}, 4, "4 learner rank"),
        ({"sequence_parallel": True}, 1, "sequence_parallel = true with learner.tensor_parallel = 1"),
        ({"virtual_pipeline": 2}, 1, "virtual_pipeline = 2 with learner.pipeline_parallel = 1"),
        (
            {"virtual_pipeline": 2, "pipeline_parallel": 2, "megatron": {"overlap_p2p_comm": "false"}},
            2,
            "overlap_p2p_comm = false",
        ),
    ],
)
def test_layout_that_cannot_run_is_refused(settings: dict[str, object], world: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_ranks(LearnerConfig(device="cpu", **settings), world)


def test_layouts_that_run_are_not_refused() -> None:
    check_ranks(LearnerConfig(tensor_parallel=2, pipeline_parallel=2, sequence_parallel=True), 8)
    check_ranks(
        LearnerConfig(tensor_parallel=2, sequence_parallel=True, expert_parallel=4, expert_tensor_parallel=1), 4
    )


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="tpu"):
        choose_device(LearnerConfig(device="tpu"))


def test_more_context_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    layout = replace(initialize(LearnerConfig(device="cpu")), context=8)
    with pytest.raises(ConfigError, match="context_parallel = 8, the policy has 4 key-value heads"):
        build_model(LearnerConfig(device="cpu", context_parallel=8), layout, folder=folder)


def test_ranks_of_a_cell_may_wait_for_work_longer_than_a_collective_may_take() -> None:
    """A rollout of an hour leaves the learner idle: that is no fault of a cell's group."""
    layout = initialize(LearnerConfig(device="cpu", collective_timeout_s=5.0))
    assert layout.cell_group._get_backend(torch.device("cpu")).options._timeout >= timedelta(days=1)
