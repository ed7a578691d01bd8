"""Which rules of a grammar have no recursion."""

from __future__ import annotations

from collections.abc import Iterator

from llguidance.gbnf_to_lark import (
    ASTNode,
    LiteralNode,
    RepetitionNode,
    RuleRefNode,
)

Rules = dict[str, ASTNode]


def expanded(rules: Rules, root: str, most: int) -> list[str] | None:
    """Return the rules that one needs, if it has no recursion and is not too large.

    Args:
        rules: all of them.
        root: the one.
        most: characters that it may have, each rule as often as it stands in others, with counts.
    """
    sizes: dict[str, int] = {}
    for name in _inner_first(rules, root):
        if name is None:
            return None
        sizes[name] = _size(rules[name], sizes)
        if sizes[name] > most:
            return None
    return list(sizes)


def _inner_first(rules: Rules, root: str) -> Iterator[str | None]:
    """Yield the rules that one needs, those within others first; None: there is recursion."""
    done: set[str] = set()
    open_ = {root}
    stack = [(root, iter(_named(rules[root])))]
    while stack:
        name, inner = stack[-1]
        for one in inner:
            if one in open_:
                yield None
                return
            if one not in done:
                open_.add(one)
                stack.append((one, iter(_named(rules[one]))))
                break
        else:
            stack.pop()
            open_.discard(name)
            done.add(name)
            yield name


def _named(node: ASTNode) -> list[str]:
    """Return the rules that a part names, each once."""
    found: dict[str, None] = {}
    left = [node]
    while left:
        one = left.pop()
        if isinstance(one, RuleRefNode):
            found[one.name] = None
        left += one.children()
    return list(found)


def _size(node: ASTNode, sizes: dict[str, int]) -> int:
    match node:
        case RuleRefNode():
            return sizes[node.name]
        case LiteralNode():
            return 1 + len(node.value)
        case RepetitionNode():
            return _size(node.node, sizes) * max(1, node.max_times or node.min_times)
    return 1 + sum(_size(one, sizes) for one in node.children())
