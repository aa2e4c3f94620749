"""Half-open integer spans, given as (start, stop) pairs."""


def length(span):
    """How many integers a span holds; 0 for an empty one."""
    start, stop = span
    return max(0, stop - start)


def merge(spans):
    """Sorted, disjoint spans over the same integers; touching spans are joined, empty ones dropped."""
    merged = []
    for start, stop in sorted(spans):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def covered(spans):
    """How many integers lie in at least one span."""
    return sum(stop - start for start, stop in merge(spans))


def gaps(spans):
    """The holes between consecutive merged spans."""
    merged = merge(spans)
    return [(left[1], right[0]) for left, right in zip(merged, merged[1:])]


def contains(spans, value):
    """Whether a value lies in one of the spans."""
    return any(start <= value < stop for start, stop in spans)


def intersect(first, second):
    """The common part of two spans, or None."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


def shift(spans, offset):
    """Every span moved by an offset."""
    return [(start + offset, stop + offset) for start, stop in spans]
