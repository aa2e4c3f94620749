"""A model of one server's prefix cache: a radix tree of token ids with least-recently-used eviction.

    held = cache.begin(prompt)     what is cached of it stays; the rest is allocated and computed; None: no room
    cache.grow(held)               keys and values of one sampled token more; False: no room
    cache.end(held, tokens)        what was computed of `tokens` may be reused (the last sampled token never is)

The rules are those of SGLang's radix cache at page size 1: at least the last prompt token is computed anew; a prompt
enters the tree when it has been computed, what was sampled when the request ends; whole leaves are evicted, least
recently used first, never one that a running request stands on. A test holds it to a real server's `cached_tokens`,
request by request (`tests/integration/test_prefix_cache_model.py`).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens below `parent`; `locks` counts the running requests that stand on it or below."""

    tokens: tuple[int, ...] = ()
    parent: Node | None = None
    children: dict[int, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0


@dataclass(eq=False, slots=True)
class Reservation:
    """A running request's hold on the cache."""

    prompt: tuple[int, ...]
    cached_tokens: int
    node: Node
    grown: int = 0  # sampled tokens with keys and values


class RadixCache:
    """`capacity` tokens of keys and values."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.free = capacity, capacity
        self._root, self._clock = Node(locks=1), itertools.count(1)

    def begin(self, prompt: Sequence[int], reserve: int = 0) -> Reservation | None:
        """Lock what is cached of `prompt` [T], allocate the rest and keep it; None, and nothing changed, where there
        is no room for it and `reserve` tokens more."""
        prompt = tuple(prompt)
        node, cached = self._walk(prompt[:-1])
        self._lock(node, 1)
        wanted = len(prompt) - cached
        if self.free + self.evictable < wanted + reserve or not self._allocate(wanted):
            self._lock(node, -1)
            return None
        whole = self._insert(prompt)
        self._lock(whole, 1)
        self._lock(node, -1)
        return Reservation(prompt, cached, whole)

    def grow(self, held: Reservation) -> bool:
        """Room for one more sampled token; False without room (the request must be taken back)."""
        if not self._allocate(1):
            return False
        self.free -= 1
        held.grown += 1
        return True

    def end(self, held: Reservation, tokens: Sequence[int]) -> None:
        """The request ends with `tokens`: its prompt and what was sampled after it."""
        self.free += held.grown
        self._lock(held.node, -1)
        self._insert(tuple(tokens)[: len(held.prompt) + held.grown])

    def flush(self) -> None:
        """Forget everything. No request runs."""
        self.__init__(self.capacity)

    @property
    def evictable(self) -> int:
        """Tokens that no running request stands on."""
        return sum(len(node.tokens) for node in self._nodes() if not node.locks)

    # ------------------------------------------------------------------------------------------ private

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _walk(self, tokens: tuple[int, ...]) -> tuple[Node, int]:
        """The deepest node of which every token is in `tokens`, and how many those are; a node is split there."""
        node, done, now = self._root, 0, next(self._clock)
        while done < len(tokens) and (child := node.children.get(tokens[done])) is not None:
            same = _common(child.tokens, tokens, done)
            child.used = now
            node = child if same == len(child.tokens) else self._split(child, same)
            done += same
            if node is not child:
                break
        return node, done

    def _split(self, node: Node, length: int) -> Node:
        """Put the first `length` tokens of `node` into a parent of their own."""
        upper = Node(node.tokens[:length], node.parent, {node.tokens[length]: node}, node.locks, node.used)
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[length:], upper
        return upper

    def _insert(self, tokens: tuple[int, ...]) -> Node:
        """The node that ends `tokens`; what the tree does not hold yet is taken from the free tokens."""
        node, done = self._walk(tokens)
        if done < len(tokens):
            self.free -= len(tokens) - done
            leaf = Node(tokens[done:], node, used=next(self._clock))
            node.children[tokens[done]] = leaf
            node = leaf
        return node

    def _allocate(self, tokens: int) -> bool:
        """Have `tokens` free, evicting leaves; False, and nothing evicted, where even all of them give too few."""
        if self.free >= tokens:
            return True
        if self.free + self.evictable < tokens:
            return False
        order = itertools.count()
        leaves = [(n.used, next(order), n) for n in self._nodes() if not n.children and not n.locks]
        heapq.heapify(leaves)
        while self.free < tokens:
            _, _, leaf = heapq.heappop(leaves)
            self.free += len(leaf.tokens)
            parent = leaf.parent
            del parent.children[leaf.tokens[0]]
            if not parent.children and not parent.locks:
                heapq.heappush(leaves, (parent.used, next(order), parent))
        return True

    def _lock(self, node: Node, step: int) -> None:
        while node is not self._root:
            node.locks += step
            node = node.parent


def _common(left: tuple[int, ...], right: tuple[int, ...], start: int) -> int:
    """How many tokens of `left` stand in `right` from `start` on."""
    length = min(len(left), len(right) - start)
    return next((i for i in range(length) if left[i] != right[start + i]), length)
