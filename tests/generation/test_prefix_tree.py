"""The radix tree against a list of its sequences."""

import random

import numpy as np
import pytest

from dms_jax.generation import prefix_tree
from dms_jax.generation.prefix_tree import PrefixTree


def array(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@pytest.mark.parametrize("seed", range(20))
def test_tree_equals_a_list_of_sequences(seed):
    """Few different tokens, so that most sequences share a prefix with others."""
    choose, tree, known = random.Random(seed), PrefixTree(), {}
    for number in range(60):
        tokens = [choose.randint(0, 2) for _ in range(choose.randint(1, 9))]
        nodes = dict(known)
        node = tree.insert(array(tokens))
        assert node is nodes.get(tuple(tokens), node)  # nodes do not move
        assert node.depth == len(tokens)
        known[tuple(tokens)] = node
        if choose.random() < 0.5:
            node.set_state(None if node.state else f"state {number}")
        asked = [choose.randint(0, 2) for _ in range(choose.randint(1, 9))]
        path, found, last = tree.walk(array(asked))
        assert found == max(common(list(each), asked) for each in known)
        depths = [len(each) for each in known if list(each) == asked[: len(each)]]
        assert set(depths) <= {each.depth for each in path}
        assert [each.depth for each in path] == sorted({each.depth for each in path})
        behind = {
            node.state
            for each, node in known.items()
            if node.state and common(list(each), asked) == found
        }
        depth = choose.randint(0, 9)
        state = last.state_below(depth)
        deep = {known[each].state for each in known if len(each) >= depth}
        assert state in (behind & deep if behind & deep else {None}) or found == 0
    size = sum(len(node.tokens) for node in nodes_of(tree))
    assert tree.size == size
    assert tree.root.states == sum(node.state is not None for node in known.values())


def nodes_of(tree: PrefixTree) -> list:
    found, stack = [], [tree.root]
    while stack:
        found.append(stack.pop())
        stack.extend(found[-1].children.values())
    return found


def test_least_recently_used_leaves_are_pruned(monkeypatch):
    monkeypatch.setattr(prefix_tree, "MOST_TOKENS", 20)
    tree = PrefixTree()
    kept = tree.insert(array([1, 2, 3, 4]))
    kept.set_state("a state")
    for first in range(5, 9):
        tree.insert(array([first] * 4))
    assert tree.size == 20
    tree.walk(array([5]))  # used again
    newest = tree.insert(array([9] * 4))
    assert tree.size <= 10
    assert tree.walk(array([1, 2, 3, 4]))[0] == [kept]
    assert tree.walk(array([9] * 4))[0] == [newest]
    assert [tree.walk(array([first] * 4))[1] for first in range(6, 9)] == [0, 0, 0]


def test_queued_prompts_are_not_pruned(monkeypatch):
    """Their prefill finds their nodes again, and requests with the same prefix share a state."""
    monkeypatch.setattr(prefix_tree, "MOST_TOKENS", 10)
    tree = PrefixTree()
    waiting = [tree.insert(array([first] * 4)) for first in range(2)]
    for node in waiting:
        node.waiting = 1
    read = tree.insert(array([2] * 2))
    tree.insert(array([3] * 4))
    assert [tree.insert(array([first] * 4)) for first in range(2)] == waiting
    assert read.depth == 2
    assert tree.walk(array([2] * 2))[0] == []
