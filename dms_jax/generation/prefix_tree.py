"""A radix tree over the tokens of sequences: shared prefixes, and where a state is cached.

    root ── "You are ..." ── document ┬─ question 1 ── answer
                                      └─ question 2

A node stands for the tokens from the root to its end. Sequences diverge only at nodes, so a shared
prefix has a node even before its state is cached.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

MOST_TOKENS = 1 << 23  # of all edges, 32 MB; beyond that, leaves without a state are pruned


class Node:
    """A prefix.

    Attributes:
      tokens: tokens of the edge from the parent.
      parent: the parent; None for the root.
      children: first token of an edge -> the child at its end.
      depth: number of tokens from the root.
      state: the cached state after these tokens, or None. Set it with `set_state`.
      states: number of states of this node and its descendants.
      ends: whether a prompt ends here.
      waiting: number of queued prompts that end here.
      used: when a sequence last passed through here.
    """

    __slots__ = (
        "children",
        "depth",
        "ends",
        "parent",
        "state",
        "states",
        "tokens",
        "used",
        "waiting",
    )

    def __init__(self, tokens: Int[np.ndarray, " n"], parent: "Node | None"):
        self.tokens, self.parent = tokens, parent
        self.children: dict[int, Node] = {}
        self.depth = len(tokens) + (0 if parent is None else parent.depth)
        self.state: Any = None
        self.states = 0
        self.ends, self.waiting = False, 0
        self.used = 0

    def set_state(self, state: Any) -> None:
        """Sets or, with None, removes the state."""
        change = (state is not None) - (self.state is not None)
        self.state, node = state, self
        while node is not None:
            node.states += change
            node = node.parent

    def with_states(self) -> Iterator["Node"]:
        """Yields this node and its descendants, those with a state."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            if node.state is not None:
                yield node
            stack.extend(each for each in node.children.values() if each.states)

    @property
    def is_awaited(self) -> bool:
        """Whether a queued prompt begins with this prefix."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            if node.waiting:
                return True
            stack.extend(node.children.values())
        return False

    def state_below(self, depth: int) -> Any:
        """Returns a state of this node or a descendant, of at least `depth` tokens; else None."""
        return next((node.state for node in self.with_states() if node.depth >= depth), None)

    def leaves(self) -> Iterator["Node"]:
        """Yields the descendants without children."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children:
                yield node


class PrefixTree:
    """The tree; see the module docstring.

    Attributes:
      root: the node of no tokens.
      size: tokens of all edges.
    """

    def __init__(self):
        self.root = Node(np.zeros(0, np.int32), None)
        self._clock = 0
        self.size = 0

    def walk(self, tokens: Int[np.ndarray, " n"]) -> tuple[list[Node], int, Node]:
        """Follows tokens from the root.

        Returns:
          The nodes that are prefixes of `tokens`, the number of tokens that were followed, and the
          node whose edge was followed last, perhaps not to its end.
        """
        self._clock += 1
        node, path, known = self.root, [], 0
        while known < len(tokens):
            child = node.children.get(int(tokens[known]))
            if child is None:
                break
            child.used = self._clock
            node = child
            common = _common(child.tokens, tokens[known:])
            known += common
            if common < len(child.tokens):
                break
            path.append(child)
        return path, known, node

    def insert(self, tokens: Int[np.ndarray, " n"]) -> Node:
        """Returns the node of these tokens, and adds it if it is new."""
        path, known, last = self.walk(tokens)
        node = path[-1] if path else self.root
        if last is not node:  # the tokens end or diverge within an edge
            node = self._split(last, known - node.depth)
        if known < len(tokens):
            leaf = Node(np.array(tokens[known:], np.int32), node)
            leaf.used = self._clock
            node.children[int(tokens[known])] = node = leaf
            self.size += len(leaf.tokens)
            if self.size > MOST_TOKENS:
                self._prune(leaf)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Splits the edge to a node after `at` tokens; returns the new node there."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.tokens[:at], parent)
        upper.used, upper.states = node.used, node.states
        node.tokens, node.parent = node.tokens[at:], upper
        parent.children[int(upper.tokens[0])] = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _prune(self, kept: Node) -> None:
        """Removes the least recently used leaves without a state, down to half of `MOST_TOKENS`.

        Queued prompts and `kept` stay.
        """
        while self.size > MOST_TOKENS // 2:
            leaves = [
                node
                for node in self.root.leaves()
                if node.state is None and not node.waiting and node not in (kept, self.root)
            ]
            if not leaves:
                return
            for node in sorted(leaves, key=lambda each: each.used):
                assert node.parent is not None
                del node.parent.children[int(node.tokens[0])]
                self.size -= len(node.tokens)
                if self.size <= MOST_TOKENS // 2:
                    return


def _common(a: Int[np.ndarray, " n"], b: Int[np.ndarray, " m"]) -> int:
    """Returns the length of the common prefix of two sequences."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length
