import pytest
from grids import best_row, diagonal, flood, neighbours, rotate, row_sums, size, transpose

GRID = [[1, 2, 3], [4, 5, 6]]


def test_size():
    assert size(GRID) == (2, 3)


def test_size_of_nothing():
    assert size([]) == (0, 0)


def test_ragged_rows_are_refused():
    with pytest.raises(ValueError):
        size([[1], [1, 2]])


def test_transpose():
    assert transpose(GRID) == [[1, 4], [2, 5], [3, 6]]


def test_rotate_clockwise():
    assert rotate(GRID) == [[4, 1], [5, 2], [6, 3]]


def test_four_turns_are_none():
    assert rotate(GRID, 4) == GRID


def test_rotate_back():
    assert rotate(rotate(GRID), -1) == GRID


def test_neighbours_in_a_corner():
    assert neighbours(GRID, 0, 0) == [(0, 1), (1, 0)]


def test_neighbours_at_the_far_corner():
    assert neighbours(GRID, 1, 2) == [(0, 2), (1, 1)]


def test_flood_stays_with_its_value():
    assert flood([[1, 1, 0], [0, 1, 0], [0, 0, 1]], 0, 0) == 3


def test_flood_of_a_lonely_cell():
    assert flood([[1, 0], [0, 1]], 0, 0) == 1


def test_diagonal():
    assert diagonal(GRID) == [1, 5]


def test_row_sums():
    assert row_sums(GRID) == [6, 15]


def test_best_row_is_the_first_of_equals():
    assert best_row([[1], [3], [3]]) == 1
