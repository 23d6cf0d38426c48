"""A radix tree over the tokens of sequences: which of them begin alike, and where a state is known.

    root ── "You are ..." ── document ┬─ question 1 ── answer
                                      └─ question 2

A node stands for the tokens from the root to its end. Where sequences part, there is a node; so
the tree also knows beginnings that several share and of which nothing is in the cache yet.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

MOST_TOKENS = 1 << 23  # of edges, in 32 MB; beyond them those that lead to no state are cut off


class Node:
    """The end of a beginning.

    Attributes:
      tokens: those of the edge that leads here.
      parent: the node before it; None for the root, and for a node that was cut off.
      children: first token of an edge -> the node that it leads to.
      depth: number of tokens from the root.
      state: what is cached of these tokens; None if nothing is. Set it with `set_state`.
      states: number of states here and behind this node.
      ends: whether a prompt ends here.
      waiting: number of prompts that end here and wait to be read.
      used: when a sequence last came through here.
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

    def state_behind(self, depth: int) -> Any:
        """Returns a state of this node or one behind it, of at least so many tokens; else None."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            if node.state is not None and node.depth >= depth:
                return node.state
            stack.extend(each for each in node.children.values() if each.states)
        return None

    def all_states(self) -> Iterator[Any]:
        """Yields the states of this node and of those behind it."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            if node.state is not None:
                yield node.state
            stack.extend(each for each in node.children.values() if each.states)

    def leaves(self) -> Iterator["Node"]:
        """Yields the ends of what comes behind this node."""
        stack: list[Node] = [self]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children:
                yield node


class PrefixTree:
    """The tree; see the module.

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
          The nodes whose tokens all come first in `tokens`, the number of tokens that are known,
          and the node whose edge was followed last, perhaps not to its end.
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
        """Returns the node at the end of these tokens, which are added if they are new."""
        path, known, last = self.walk(tokens)
        node = path[-1] if path else self.root
        if last is not node:  # the edge parts here
            node = self._split(last, known - node.depth)
        if known < len(tokens):
            leaf = Node(np.array(tokens[known:], np.int32), node)
            leaf.used = self._clock
            node.children[int(tokens[known])] = node = leaf
            self.size += len(leaf.tokens)
            if self.size > MOST_TOKENS:
                self._cut_off(leaf)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Puts a node into an edge, behind its first `at` tokens."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.tokens[:at], parent)
        upper.used, upper.states = node.used, node.states
        node.tokens, node.parent = node.tokens[at:], upper
        parent.children[int(upper.tokens[0])] = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def _cut_off(self, kept: Node) -> None:
        """Removes the ends without a state that were used least recently, down to half the size.

        Those of prompts that wait stay.
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
    """Returns how many first tokens two sequences have in common."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(differ.argmax()) if differ.any() else length
