"""Rules of a grammar as they cost the least: without recursion, or repetitions within others.

A parser has an item for each place where what it has seen of a repetition may begin. Where one is
in another over the same characters, as in `(w+)*`, that is each character, so it is written `w*`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeGuard

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    LiteralNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

Rules = dict[str, ASTNode]
MOST_LOOKS = 200_000  # at parts of a grammar; what is not looked at stays as it is
MOST_NESTED = 300  # parts in parts of a terminal, which take the compiler's stack
MOST_DEEP = 50  # rules in rules that a repetition is looked for in
MOST_PASSES = 20  # over all rules, to learn which may be empty


def expanded(rules: Rules, root: str, most: int) -> list[str] | None:
    """Return the rules that one needs, if it has no recursion and is not too large.

    Args:
        rules: all of them.
        root: the one.
        most: characters that it may have, each rule as often as it stands in others, with counts.
    """
    found = _plain(rules, [root], most)
    return found if root in found else None


def _plain(rules: Rules, roots: Iterable[str], most: int) -> list[str]:
    """Return those of some rules, and of what they need, that have no recursion and not too much.

    Args:
        rules: all of them.
        roots: some.
        most: see `expanded`.
    """
    sizes: dict[str, int] = {}
    depths: dict[str, int] = {}
    for name in _inner_first(rules, roots):
        if all(one in sizes for one in _named(rules[name])):
            size, depth = _size(rules[name], sizes), _depth(rules[name], depths)
            if size <= most and depth <= MOST_NESTED:
                sizes[name], depths[name] = size, depth
    return list(sizes)


def _inner_first(rules: Rules, roots: Iterable[str]) -> Iterator[str]:
    """Yield rules and those that they need, each behind those within it, but where they recur."""
    seen: set[str] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(_named(rules[root])))]
        while stack:
            inner = stack[-1][1]
            one = next((one for one in inner if one not in seen), None)
            if one is None:
                yield stack.pop()[0]
            else:
                seen.add(one)
                stack.append((one, iter(_named(rules[one]))))


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


def own_depth(node: ASTNode) -> int:
    """Return how deep the parts of a rule stand in each other, others that it names left out."""
    return 1 + max(map(own_depth, node.children()), default=0)


def _depth(node: ASTNode, depths: dict[str, int]) -> int:
    if isinstance(node, RuleRefNode):
        return depths[node.name]
    return 1 + max((_depth(one, depths) for one in node.children()), default=0)


def without_nested(rules: Rules) -> Rules:
    """Return rules with the same texts, of which repetitions in repetitions are one, if possible.

    `(x+)*` is `x*`, `(x* y?)*` is `(x | y)*`, `(x+ y?)+` is `(x y?)+`, `(x y*)+` is `x (x | y)*`,
    and so on, also where rules are between.
    """
    repeats = _Repeats(rules)
    for _ in range(2):  # so that what is looked at has been through it, too
        for name, node in repeats.rules.items():
            repeats.rules[name] = repeats.flat(node)
    return repeats.rules


class _Repeats:
    """Makes repetitions in repetitions one."""

    def __init__(self, rules: Rules) -> None:
        self.rules = dict(rules)
        self._left = MOST_LOOKS
        # A rule is not written into itself.
        self._plain = set(_plain(rules, rules, MOST_LOOKS))
        self._empty: set[str] = set()  # rules that may be empty, as far as that is known
        for number in range(MOST_PASSES):
            names = list(rules) if number % 2 else list(reversed(rules))
            new = {name for name in names if name not in self._empty and self._note(name)}
            if not new:
                break

    def flat(self, node: ASTNode) -> ASTNode:
        """Return a part without repetitions in repetitions."""
        match node:
            case AlternativeNode():
                return AlternativeNode([self.flat(one) for one in node.alternatives])
            case SequenceNode():
                return SequenceNode([self.flat(one) for one in node.nodes])
            case RepetitionNode():
                inner = self.flat(node.node)
                if _is_endless(node):
                    return self._repeated(inner, node.min_times)
                if isinstance(inner, RepetitionNode) and _is_endless(inner):
                    return RepetitionNode(inner.node, inner.min_times * node.min_times, None)
                return RepetitionNode(inner, node.min_times, node.max_times)
        return node

    def _repeated(self, node: ASTNode, least: int) -> ASTNode:
        """Return a part as often as one likes, at least 0 or 1 times."""
        units, may_be_empty = self._units(node, frozenset())
        units = list({repr(one): one for one in units}.values())
        least = 0 if may_be_empty else least
        if len(units) != 1:
            return RepetitionNode(AlternativeNode(units), least, None) if units else _nothing()
        [unit] = units
        if not isinstance(unit, SequenceNode) or len(unit.nodes) != 2:
            return RepetitionNode(unit, least, None)
        first, last = unit.nodes
        if _is_any_number(last):  # (x y*)+
            both = self._repeated(AlternativeNode([first, last.node]), 0)
            row = SequenceNode([first, both])
        elif _is_any_number(first):  # (y* x)+
            both = self._repeated(AlternativeNode([first.node, last]), 0)
            row = SequenceNode([both, last])
        else:
            return RepetitionNode(unit, least, None)
        return row if least else RepetitionNode(row, 0, 1)

    def _units(self, node: ASTNode, within: frozenset[str]) -> tuple[list[ASTNode], bool]:
        """Return parts of which repetitions are those of a part, and whether that may be empty.

        Args:
            node: the part; itself, and False, is always right.
            within: rules that are being looked at.
        """
        self._left -= 1
        if self._left < 0:
            return [node], False
        match node:
            case RepetitionNode() if node.min_times <= 1:
                units, may_be_empty = self._units(node.node, within)
                return units, may_be_empty or node.min_times == 0
            case AlternativeNode():
                return _all(self._units(one, within) for one in node.alternatives)
            case RuleRefNode() if node.name in self._plain and len(within) < MOST_DEEP:
                rule = self.rules[node.name]
                found = self._units(rule, within | {node.name})
                return ([node], False) if found == ([rule], False) else found
            case LiteralNode(value=""):
                return [], True
            case SequenceNode() if all(map(self._may_be_empty, node.nodes)):
                units, _ = _all(self._units(one, within) for one in node.nodes)
                return units, True
            case SequenceNode():
                shorter = self._shorter(node, within)
                return ([node], False) if shorter is None else self._units(*shorter)
        return [node], False

    def _shorter(
        self, row: SequenceNode, within: frozenset[str]
    ) -> tuple[ASTNode, frozenset[str]] | None:
        """Return a row of which repetitions are those of another; None: there is none.

        It has one part that is not empty, `x+`, of which one is enough.
        """
        needed = [place for place, one in enumerate(row.nodes) if not self._may_be_empty(one)]
        if len(needed) != 1:
            return None
        [place] = needed
        part = row.nodes[place]
        is_shallow = len(within) < MOST_DEEP
        if isinstance(part, RuleRefNode) and is_shallow and part.name in self._plain:
            within |= {part.name}
            part = self.rules[part.name]
        new = _once(part)
        if isinstance(new, AlternativeNode):
            new = AlternativeNode([_once(one) for one in new.alternatives])
        if new == row.nodes[place] or (new == part and not isinstance(part, SequenceNode)):
            return None
        inner = new.nodes if isinstance(new, SequenceNode) else [new]
        return SequenceNode([*row.nodes[:place], *inner, *row.nodes[place + 1 :]]), within

    def _note(self, name: str) -> bool:
        """Keep a rule in mind, if it may be empty."""
        if self._may_be_empty(self.rules[name]):
            self._empty.add(name)
        return name in self._empty

    def _may_be_empty(self, node: ASTNode) -> bool:
        """Whether the empty text is one of a part's; False also where that is not known."""
        match node:
            case RuleRefNode():
                return node.name in self._empty
            case LiteralNode():
                return not node.value
            case RepetitionNode():
                return node.min_times == 0 or self._may_be_empty(node.node)
            case AlternativeNode():
                return any(map(self._may_be_empty, node.alternatives))
            case SequenceNode():
                return all(map(self._may_be_empty, node.nodes))
        return False


def _once(node: ASTNode) -> ASTNode:
    """Return what `x+` or `x{1,n}` repeats; another part as it is."""
    return node.node if isinstance(node, RepetitionNode) and node.min_times == 1 else node


def _is_endless(node: RepetitionNode) -> bool:
    """Whether a part comes as often as one likes, at least 0 or 1 times."""
    return node.min_times <= 1 and node.max_times is None


def _is_any_number(node: ASTNode) -> TypeGuard[RepetitionNode]:
    """Whether a part is `x*`."""
    return isinstance(node, RepetitionNode) and _is_endless(node) and node.min_times == 0


def _all(found: Iterable[tuple[list[ASTNode], bool]]) -> tuple[list[ASTNode], bool]:
    """Return the parts of all, and whether one of them may be empty."""
    units: list[ASTNode] = []
    may_be_empty = False
    for some, each in found:
        units += some
        may_be_empty = may_be_empty or each
    return units, may_be_empty


def _nothing() -> ASTNode:
    return SequenceNode([])
