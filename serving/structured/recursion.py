"""Rules of a grammar that name themselves at their end, with repetitions instead.

A parser has an item for each rule that has begun and not ended. Of `lines ::= line lines?` that is
one for each line, so it is written `lines ::= line+`; and `a ::= x b`, `b ::= y a | z` are
`a ::= x b`, `b ::= (y x)* z`. It is the elimination by which right-linear equations become a
regular expression (Arden 1961), where `a = x a | y` is `x* y`; the texts are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from onnxport.serving.structured.repeats import Rules

# A way that a rule may go: its parts, and the rule that it ends with, if it is one of its group.
Row = tuple[list[ASTNode], str | None]
MOST_ROWS = 1000  # ways of all rules of a group; with more they stay as they are


class _TooManyError(Exception):
    """Rules would become too large."""


def without_tail_recursion(rules: Rules) -> Rules:
    """Return rules with the same texts, of which none leads to itself by what they end with.

    Rules stay as they are where they would become too large, or no text could end.
    """
    tails = {name: list(dict.fromkeys(_tails(node))) for name, node in rules.items()}
    result = dict(rules)
    for group in _groups(tails):
        try:
            result |= _without_cycles(group, result)
        except _TooManyError:
            continue
    return result


def _tails(node: ASTNode) -> Iterator[str]:
    """Yield the rules that a part may end with, and that nothing of it can follow."""
    match node:
        case RuleRefNode():
            yield node.name
        case AlternativeNode():
            for one in node.alternatives:
                yield from _tails(one)
        case SequenceNode() if node.nodes:
            yield from _tails(node.nodes[-1])
        case RepetitionNode() if _is_optional(node):
            yield from _tails(node.node)


def _groups(tails: dict[str, list[str]]) -> Iterator[list[str]]:
    """Yield the rules that lead to each other, or to themselves, by their ends (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    open_: dict[str, None] = {}
    for root in tails:
        if root in index:
            continue
        stack = [(root, iter(tails[root]))]
        index[root] = low[root] = len(index)
        open_[root] = None
        while stack:
            name, inner = stack[-1]
            for one in inner:
                if one not in index:
                    index[one] = low[one] = len(index)
                    open_[one] = None
                    stack.append((one, iter(tails[one])))
                    break
                if one in open_:
                    low[name] = min(low[name], index[one])
            else:
                stack.pop()
                if stack:
                    low[stack[-1][0]] = min(low[stack[-1][0]], low[name])
                if low[name] == index[name]:
                    group = _popped(open_, name)
                    if len(group) > 1 or name in tails[name]:
                        yield group


def _popped(open_: dict[str, None], name: str) -> list[str]:
    """Take what was opened last off, up to a name."""
    group: list[str] = []
    while name in open_:
        group.append(open_.popitem()[0])
    return group[::-1]


def _without_cycles(group: list[str], rules: Rules) -> Rules:
    """Return the rules of a group, each of which ends with later ones at most.

    Raises:
        _TooManyError: they would be too large.
    """
    order = {name: place for place, name in enumerate(group)}
    made: dict[str | None, list[Row]] = {}
    num_rows = 0
    for name in group:
        rows = list(_rows(rules[name], order))
        while any(tail in made for _, tail in rows):
            num_rows += sum(len(made[tail]) for _, tail in rows if tail in made)
            if num_rows > MOST_ROWS:
                raise _TooManyError
            rows = [
                (parts + more, end)
                for parts, tail in rows
                for more, end in made.get(tail, [([], tail)])
            ]
        num_rows += len(rows)
        made[name] = _without_itself(name, rows)
    return {
        name: _either(
            [*parts, *([] if tail is None else [RuleRefNode(tail)])] for parts, tail in rows
        )
        for name, rows in ((name, made[name]) for name in group)
    }


def _without_itself(name: str, rows: list[Row]) -> list[Row]:
    """Return the ways of a rule, of which none ends with it.

    Raises:
        _TooManyError: all did, so that there is no text.
    """
    loops = [parts for parts, tail in rows if tail == name]
    ends: dict[str | None, list[list[ASTNode]]] = {}
    for parts, tail in rows:
        if tail != name:
            ends.setdefault(tail, []).append(parts)
    if not ends:
        raise _TooManyError
    if not loops:
        return rows
    if list(ends) == [None] and repr(ends[None]) == repr(loops):
        return [([RepetitionNode(_either(loops), 1, None)], None)]
    loop = RepetitionNode(_either(loops), 0, None)
    return [([loop, _either(some)], tail) for tail, some in ends.items()]


def _rows(node: ASTNode, group: Iterable[str]) -> Iterator[Row]:
    """Yield the ways that a part may go, told apart as far as rules of a group end them."""
    match node:
        case RuleRefNode() if node.name in group:
            yield [], node.name
        case _ if not any(name in group for name in _tails(node)):
            yield [node], None
        case AlternativeNode():
            for one in node.alternatives:
                yield from _rows(one, group)
        case SequenceNode():
            for parts, tail in _rows(node.nodes[-1], group):
                yield [*node.nodes[:-1], *parts], tail
        case RepetitionNode():
            yield from _rows(node.node, group)
            yield [], None


def _is_optional(node: RepetitionNode) -> bool:
    return node.min_times == 0 and node.max_times == 1


def _either(rows: Iterable[list[ASTNode]]) -> ASTNode:
    """Return a part that is one of some rows of parts."""
    made = [row[0] if len(row) == 1 else SequenceNode(_flat(row)) for row in rows]
    return made[0] if len(made) == 1 else AlternativeNode(made)


def _flat(row: list[ASTNode]) -> list[ASTNode]:
    """Return the parts of a row, those of rows in it among them."""
    return [each for one in row for each in (one.nodes if isinstance(one, SequenceNode) else [one])]
