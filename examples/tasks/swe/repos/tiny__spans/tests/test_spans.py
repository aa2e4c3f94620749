import pytest
from spans import contains, covered, gaps, intersect, length, merge, shift


def test_length_counts_integers():
    assert length((2, 5)) == 3


def test_length_of_an_empty_span_is_zero():
    assert length((5, 2)) == 0


def test_touching_spans_join():
    assert merge([(0, 3), (3, 5)]) == [(0, 5)]


def test_nested_span_is_absorbed():
    assert merge([(0, 10), (2, 4)]) == [(0, 10)]


def test_empty_span_is_dropped():
    assert merge([(4, 4), (1, 2)]) == [(1, 2)]


def test_covered_counts_once():
    assert covered([(0, 4), (2, 6)]) == 6


def test_gap_between_spans():
    assert gaps([(0, 3), (3, 5), (9, 10)]) == [(5, 9)]


@pytest.mark.parametrize(("value", "inside"), [(0, True), (2, True), (3, False), (-1, False)])
def test_a_span_holds_its_start_and_not_its_stop(value, inside):
    assert contains([(0, 3)], value) is inside


def test_intersection():
    assert intersect((0, 5), (3, 9)) == (3, 5)


def test_touching_spans_have_no_intersection():
    assert intersect((0, 3), (3, 5)) is None


def test_shift_moves_both_ends():
    assert shift([(0, 2), (5, 6)], 3) == [(3, 5), (8, 9)]
