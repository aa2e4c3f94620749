"""Rectangular grids as lists of rows."""


def size(grid):
    """(rows, columns); raises ValueError if rows differ in length."""
    widths = {len(row) for row in grid}
    if len(widths) > 1:
        raise ValueError("rows differ in length")
    return len(grid), widths.pop() if widths else 0


def transpose(grid):
    """Rows become columns."""
    return [list(column) for column in zip(*grid)]


def rotate(grid, turns=1):
    """The grid turned clockwise by quarter turns; negative turns go the other way."""
    for _ in range(turns % 4):
        grid = transpose(grid[::-1])
    return grid


def neighbours(grid, row, column):
    """Positions above, below, left and right that lie in the grid, sorted."""
    rows, columns = size(grid)
    near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return sorted((r, c) for r, c in near if 0 <= r < rows and 0 <= c < columns)


def flood(grid, row, column):
    """How many cells of the same value hang together with the one given."""
    value, seen, open_cells = grid[row][column], {(row, column)}, [(row, column)]
    while open_cells:
        for cell in neighbours(grid, *open_cells.pop()):
            if cell not in seen and grid[cell[0]][cell[1]] == value:
                seen.add(cell)
                open_cells.append(cell)
    return len(seen)


def diagonal(grid):
    """The values from the top left on."""
    rows, columns = size(grid)
    return [grid[i][i] for i in range(min(rows, columns))]


def row_sums(grid):
    """The sum of each row."""
    return [sum(row) for row in grid]


def best_row(grid):
    """The index of the row with the largest sum; the first of equals."""
    sums = row_sums(grid)
    return max(range(len(sums)), key=lambda i: (sums[i], -i))
