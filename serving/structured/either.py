"""Places of a grammar where any token but one may come, or text.

The library takes a token that fits both for the first, and never for the text, so of `!<[5]>* "x"`
no text could end. Such places are found as those of two ways in LL(1) grammars are: by what each
begins with, and by what may follow. Ways that part later than by their first token are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from onnxport.serving.structured.repeats import Rules

MOST_LOOKS = 500_000  # at parts of a grammar
NOTHING, ANY, TEXT = 1, 2, 4  # what a part may begin with; nothing: it may be empty
_BOTH = ANY | TEXT


class TooManyLooksError(Exception):
    """A grammar is too large to be looked at."""


def may_be_either(
    rules: Rules, root: str, is_any: Callable[[ASTNode], bool], *, is_whole: bool
) -> str | None:
    """Return a rule in which any token but one, or text may come at one place; None: there is none.

    Args:
        rules: all of them.
        root: the first one.
        is_any: whether a part is any token but one.
        is_whole: nothing follows the texts.

    Raises:
        TooManyLooksError: the grammar is too large.
    """
    return _Looker(rules, is_any).found(root, 0 if is_whole else TEXT)


class _Looker:
    """Keeps what rules begin with, and what follows them."""

    def __init__(self, rules: Rules, is_any: Callable[[ASTNode], bool]) -> None:
        self._rules = dict(rules)
        self._is_any = is_any
        self._begins = dict.fromkeys(rules, 0)
        self._follows = dict.fromkeys(rules, 0)
        self._left = MOST_LOOKS
        self._has_either = False

    def found(self, root: str, follows: int) -> str | None:
        before: dict[str, int] | None = None
        while before != self._begins:
            before = dict(self._begins)
            for name in reversed(self._rules):  # those that others name usually come later
                self._begins[name] = self._begin(self._rules[name])
        self._follows[root] = follows
        before = None
        while before != self._follows:
            before = dict(self._follows)
            for name, node in self._rules.items():
                self._has_either = False
                self._walk(node, self._follows[name])
                if self._has_either:
                    return name
        return None

    def _begin(self, node: ASTNode) -> int:
        """Return what a part begins with, as far as that is known."""
        self._left -= 1
        if self._left < 0:
            raise TooManyLooksError
        match node:
            case RuleRefNode():
                return self._begins[node.name]
            case AlternativeNode():
                found = 0
                for one in node.alternatives:
                    found |= self._begin(one)
                return found
            case SequenceNode():
                return self._row(map(self._begin, node.nodes))
            case RepetitionNode():
                return self._begin(node.node) | (0 if node.min_times else NOTHING)
            case LiteralNode() | RegexNode():
                return TEXT if not isinstance(node, LiteralNode) or node.value else NOTHING
        return ANY if self._is_any(node) else 0

    def _row(self, parts: Iterable[int]) -> int:
        found = NOTHING
        for one in parts:
            found = (found & ~NOTHING) | one
            if not one & NOTHING:
                break
        return found

    def _walk(self, node: ASTNode, follows: int) -> None:
        """Look at all ways of a part, and note what follows the rules that it names."""
        match node:
            case RuleRefNode():
                self._follows[node.name] |= follows
            case AlternativeNode():
                self._compare([self._then(one, follows) for one in node.alternatives])
                for one in node.alternatives:
                    self._walk(one, follows)
            case SequenceNode():
                for one in reversed(node.nodes):
                    self._walk(one, follows)
                    follows = self._then(one, follows)
            case RepetitionNode():
                begins = self._begin(node.node) & _BOTH
                if node.min_times != node.max_times:
                    self._compare([begins, follows])
                self._walk(node.node, follows if node.max_times == 1 else follows | begins)

    def _then(self, node: ASTNode, follows: int) -> int:
        """Return what comes first of a part and what follows it."""
        found = self._begin(node)
        return (found | follows if found & NOTHING else found) & _BOTH

    def _compare(self, ways: list[int]) -> None:
        """Note whether one way begins with any token, and another one with text."""
        tokens, texts = ([place for place, one in enumerate(ways) if one & x] for x in (ANY, TEXT))
        if tokens and texts and not (tokens == texts and len(texts) == 1):
            self._has_either = True
