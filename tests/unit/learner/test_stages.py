"""Pipeline stages where layers do not divide."""

import itertools

import pytest

from megathunder.errors import ConfigError
from megathunder.learner.model.pipeline_split import uneven_stages


def legal(layers, stages):
    """(first, middle, last) of every split that Megatron-Core can build."""
    sizes = range(1, layers + 1)
    if stages == 2:
        return [(first, 0, layers - first) for first in range(1, layers)]
    return [
        (first, middle, last)
        for first, last in itertools.product(sizes, sizes)
        for middle in sizes
        if first + last + (stages - 2) * middle == layers
    ]


def test_the_largest_stage_is_as_small_as_a_split_allows():
    for layers, stages in ((3, 2), (4, 3), (5, 4), (10, 4), (11, 2), (13, 3), (23, 16), (30, 16)):
        first, last = uneven_stages(layers, stages)
        chosen = next(s for s in legal(layers, stages) if s[0] == first and s[2] == last)
        assert max(chosen) == min(max(s) for s in legal(layers, stages))
        assert first >= last


def test_three_layers_on_two_stages_are_two_and_one():
    assert uneven_stages(3, 2) == (2, 1)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="3 layers over pipeline_parallel 4"):
        uneven_stages(3, 4)
