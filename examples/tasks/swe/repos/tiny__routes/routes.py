"""Directed graphs as {node: {neighbour: distance}}."""

import heapq


def nodes(graph):
    """Every node, sorted, also those that only occur as a neighbour."""
    return sorted(set(graph) | {there for near in graph.values() for there in near})


def distance(graph, start, goal):
    """The length of the shortest way, or None."""
    done, waiting = set(), [(0, start)]
    while waiting:
        far, here = heapq.heappop(waiting)
        if here == goal:
            return far
        if here in done:
            continue
        done.add(here)
        for there, step in graph.get(here, {}).items():
            if there not in done:
                heapq.heappush(waiting, (far + step, there))
    return None


def reachable(graph, start):
    """Nodes that can be reached, the start included, sorted."""
    seen, waiting = {start}, [start]
    while waiting:
        for there in graph.get(waiting.pop(), {}):
            if there not in seen:
                seen.add(there)
                waiting.append(there)
    return sorted(seen)


def reverse(graph):
    """Every edge turned round."""
    turned = {}
    for here, near in graph.items():
        for there, step in near.items():
            turned.setdefault(there, {})[here] = step
    return turned


def order(graph):
    """Nodes so that every edge goes forward, smallest name first; ValueError for a cycle."""
    left = {node: 0 for node in nodes(graph)}
    for near in graph.values():
        for there in near:
            left[there] += 1
    free, result = sorted(node for node, count in left.items() if count == 0), []
    while free:
        here = free.pop(0)
        result.append(here)
        for there in graph.get(here, {}):
            left[there] -= 1
            if left[there] == 0:
                free = sorted([*free, there])
    if len(result) < len(left):
        raise ValueError("the graph has a cycle")
    return result


def total(graph):
    """The sum of all distances."""
    return sum(step for near in graph.values() for step in near.values())
