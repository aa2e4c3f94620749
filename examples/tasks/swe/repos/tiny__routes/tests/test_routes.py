import pytest
from routes import distance, nodes, order, reachable, reverse, total

GRAPH = {"a": {"b": 1, "c": 5}, "b": {"c": 2}, "d": {"a": 1}}


def test_nodes_include_those_without_edges():
    assert nodes(GRAPH) == ["a", "b", "c", "d"]


def test_the_shortest_way_is_taken():
    assert distance(GRAPH, "a", "c") == 3


def test_no_way():
    assert distance(GRAPH, "c", "a") is None


def test_the_way_to_itself_is_zero():
    assert distance(GRAPH, "a", "a") == 0


def test_a_longer_first_step_may_be_shorter():
    assert distance({"s": {"x": 1, "y": 4}, "x": {"t": 9}, "y": {"t": 1}}, "s", "t") == 5


def test_reachable():
    assert reachable(GRAPH, "a") == ["a", "b", "c"]


def test_reachable_from_a_dead_end():
    assert reachable(GRAPH, "c") == ["c"]


def test_reverse_twice_is_the_graph():
    assert reverse(reverse(GRAPH)) == GRAPH


def test_order_goes_forward():
    assert order(GRAPH) == ["d", "a", "b", "c"]


def test_order_prefers_small_names():
    assert order({"b": {}, "a": {}, "c": {}}) == ["a", "b", "c"]


def test_a_cycle_has_no_order():
    with pytest.raises(ValueError):
        order({"a": {"b": 1}, "b": {"a": 1}})


def test_total():
    assert total(GRAPH) == 9
