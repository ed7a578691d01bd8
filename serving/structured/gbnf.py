"""llama.cpp's grammars, GBNF, in Lark's syntax as llguidance compiles it.

The library's own translation makes of rules without recursion terminals, which take as many
characters as they can: of `word "x"` with `word ::= [a-z]+` no text could end. Here a grammar
without recursion is one terminal as a whole, where nothing follows it; of any other every rule
stays a rule, and single characters are what is told apart, so that the texts are those of
llama.cpp. The library reads the grammar; tokens in it, which it does not know, are names to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from onnxport.serving.structured.either import TooManyLooksError, may_be_either
from onnxport.serving.structured.names import NO_NAMES, TokenNames
from onnxport.serving.structured.recursion import without_tail_recursion
from onnxport.serving.structured.repeats import Rules, expanded, own_depth, without_nested

_ESCAPE = re.compile(
    r"""\\(?:(?P<dash>-)
    |u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|x(?P<two>[0-9a-fA-F]{2})
    |.)""",
    re.VERBOSE | re.DOTALL,
)
# What stands for itself, and a token, which newer versions of llama.cpp know.
_ATOM = re.compile(
    r"""\#[^\r\n]*
    |"(?:\\.|[^"\\])*"
    |\[(?:\\.|[^\]\\])*\]
    |(?P<not>!?)(?P<token><(?:\[(?P<id>[0-9]{1,9})\]|[^>]*)>)""",
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(r"\\x..|\\.|.", re.DOTALL)
_UNQUOTED = re.compile(r'["\\\x00-\x1f\x7f]')
_CONTROLS = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}
_SURROGATES = range(0xD800, 0xE000)
_NOTHING = '""'
MOST_NESTED = (
    8  # groups of one rule; deeper ones get rules of their own, as the library has a limit
)
MOST_IN_TERMINAL = 100_000  # characters of a terminal, each as often as it may be told apart
MOST_LEVELS = 5000  # of all rules, which take the compiler's stack if each stands in the next one
MOST_PARTS = 50_000  # of rules, which the compiler numbers with 16 bits, and some of its own


class TooLargeError(ValueError):
    """A grammar is too large; says how much is allowed."""


@dataclass
class TokenNode(ASTNode):
    """A token, or any but one; `told` is how Lark's syntax has it."""

    told: str
    is_any: bool

    def __str__(self) -> str:
        return self.told


def lark_of(text: str, names: TokenNames = NO_NAMES, *, is_whole: bool = False) -> str:
    """Return a grammar in Lark's syntax.

    Args:
        text: in GBNF.
        names: of tokens.
        is_whole: nothing follows its texts, and nothing else may come instead.

    Raises:
        Exception: it is no grammar; says why. Some are the library's own.
    """
    text, tokens = _with_named_tokens(text, names)
    parsed = GrammarParser().parse(_ESCAPE.sub(_plain, text))
    if "root" not in parsed:
        raise ValueError("it has no rule named root")
    known: dict[str, ASTNode | None] = {**dict.fromkeys(parsed), **tokens}
    rules: Rules = {name: _tidied(rule.alternatives, known) for name, rule in parsed.items()}
    if any(one.is_any for one in tokens.values()):
        _refuse_either(rules, is_whole=is_whole)
    rules = without_tail_recursion(rules)
    if (
        is_whole
        and not tokens
        and (reached := expanded(rules, "root", MOST_IN_TERMINAL)) is not None
    ):
        return _Writer({name: rules[name] for name in reached}, is_terminal=True).written()
    if (levels := sum(map(own_depth, rules.values()))) > MOST_LEVELS:
        raise TooLargeError(
            f"has rules in GBNF that stand in each other up to {levels} parts deep, at most "
            f"{MOST_LEVELS} are supported; make it smaller, or write it in Lark's syntax"
        )
    return _Writer(without_nested(rules), is_terminal=False).written()


def _with_named_tokens(text: str, names: TokenNames) -> tuple[str, Mapping[str, TokenNode]]:
    """Return a grammar with names instead of tokens, and what each stands for.

    Raises:
        ValueError: there is no such token, or it is no text's.
    """
    tokens: dict[str, TokenNode] = {}
    prefix = "token"
    while prefix in text:
        prefix += "_"

    def named(found: re.Match[str]) -> str:
        if found["token"] is None:
            return found[0]
        told = names.excluding if found["not"] else names.only
        name = f"{prefix}{len(tokens)}"
        tokens[name] = TokenNode(told(found["token"], found["id"]), bool(found["not"]))
        return f" {name} "

    return _ATOM.sub(named, text), tokens


def _refuse_either(rules: Rules, *, is_whole: bool) -> None:
    """Raise ValueError if any token but one may come where text may come, too."""
    try:
        found = may_be_either(rules, "root", _is_any, is_whole=is_whole)
    except TooManyLooksError:
        raise TooLargeError("is too large for a token with !; make it smaller") from None
    if found is not None:
        raise ValueError(
            f"in the rule {found} a token with ! may come where text may come, too; end its "
            "repetition, or begin the other way, with a token such as <[10]>, or write it as text"
        )


def _is_any(node: ASTNode) -> bool:
    return isinstance(node, TokenNode) and node.is_any


def _tidied(node: ASTNode, names: Mapping[str, ASTNode | None]) -> ASTNode:
    """Return a part of a grammar without groups of one part, and counts of one.

    Args:
        node: the part.
        names: of all rules, and of what is no rule and stands for itself.
    """
    match node:
        case AlternativeNode():
            parts = [_tidied(one, names) for one in node.alternatives]
            return parts[0] if len(parts) == 1 else AlternativeNode(parts)
        case SequenceNode():
            row: list[ASTNode] = []
            for one in node.nodes:
                part = _tidied(one, names)
                row += part.nodes if isinstance(part, SequenceNode) else [part]
            return row[0] if len(row) == 1 else SequenceNode(row)
        case RepetitionNode():
            inner = _tidied(node.node, names)
            if node.max_times is not None and node.max_times < node.min_times:
                raise ValueError(
                    f"it has the count {{{node.min_times},{node.max_times}}}, whose end is less "
                    "than its beginning"
                )
            if node.max_times == 0:
                return SequenceNode([])
            if node.min_times == node.max_times == 1:
                return inner
            return RepetitionNode(inner, node.min_times, node.max_times)
        case RuleRefNode() if node.name not in names:
            raise ValueError(f"there is no rule named {node.name!r}")
        case RuleRefNode():
            return names[node.name] or node
        case LiteralNode():
            return LiteralNode("".join(map(_character, _CHARACTER.findall(node.value))))
    return node


class _Writer:
    """Writes rules in Lark's syntax, as rules or as terminals."""

    def __init__(self, rules: Rules, *, is_terminal: bool) -> None:
        self._rules = rules
        self._is_terminal = is_terminal
        self._names = {name: self._name("r", number, name) for number, name in enumerate(rules)}
        if not is_terminal:
            self._names["root"] = "start"
        self._groups: list[ASTNode] = []  # that get rules of their own
        self._num_parts = 0

    def written(self) -> str:
        """Return all of the grammar."""
        lines = [f"{self._names[name]}: {self._top(node)}" for name, node in self._rules.items()]
        for number, node in enumerate(self._groups):  # which grow meanwhile
            lines.append(f"{self._name('g', number)}: {self._top(node)}")
        if self._is_terminal:
            lines.append(f"start: {self._names['root']}")
        elif self._num_parts > MOST_PARTS:
            raise TooLargeError(
                f"has {self._num_parts} parts and characters of texts in GBNF, at most "
                f"{MOST_PARTS} are supported where its rules are recursive, or it is a part of "
                "another form; write it in Lark's syntax, with long lists of words as terminals, "
                "or send a choice"
            )
        return "\n".join(lines)

    def _name(self, kind: str, number: int, name: str = "") -> str:
        """Return a name as Lark may have it."""
        made = f"{kind}{number}_{re.sub('[^a-z0-9]', '_', name.lower())}"
        return made.upper() if self._is_terminal else made

    def _top(self, node: ASTNode) -> str:
        """Return what a rule is."""
        if isinstance(node, AlternativeNode):
            return " | ".join(self._row(one, 0) for one in node.alternatives)
        return self._row(node, 0)

    def _row(self, node: ASTNode, depth: int) -> str:
        """Return parts in a row, `depth` groups within a rule."""
        if isinstance(node, SequenceNode):
            return " ".join(self._one(one, depth) for one in node.nodes) or _NOTHING
        return self._one(node, depth)

    def _one(self, node: ASTNode, depth: int) -> str:
        """Return one part, in brackets where it would be several."""
        self._num_parts += 1
        match node:
            case AlternativeNode() | SequenceNode() if depth == MOST_NESTED:
                self._groups.append(node)
                return self._name("g", len(self._groups) - 1)
            case AlternativeNode():
                return f"({' | '.join(self._row(one, depth + 1) for one in node.alternatives)})"
            case SequenceNode():
                return f"({self._row(node, depth + 1)})" if node.nodes else _NOTHING
            case RepetitionNode():
                most = "" if node.max_times is None else node.max_times
                self._num_parts += 2 * (node.max_times or node.min_times).bit_length()
                return f"{self._counted(node.node, depth)}{{{node.min_times},{most}}}"
            case RuleRefNode():
                return self._names[node.name]
            case LiteralNode() if self._is_terminal:
                return _quoted(node.value)
            case LiteralNode():
                self._num_parts += len(node.value)
                return " ".join(map(_quoted, node.value)) or _NOTHING
            case TokenNode():
                return node.told
            case RegexNode():
                return "/(?s:.)/" if node.rx == "." else _class(node.rx)
        raise ValueError(f"it has {node}, which is not known")

    def _counted(self, node: ASTNode, depth: int) -> str:
        """Return what is repeated."""
        several = isinstance(node, LiteralNode) and len(node.value) != 1
        if isinstance(node, RepetitionNode) or several:
            return self._one(SequenceNode([node]), depth)
        return self._one(node, depth)


def _quoted(text: str) -> str:
    """Return a text in Lark's syntax."""
    return f'"{_UNQUOTED.sub(lambda found: _escaped(found[0]), text)}"'


def _escaped(character: str) -> str:
    return f"\\{character}" if character in '"\\' else f"\\x{ord(character):02x}"


def _class(told: str) -> str:
    """Return a class of characters, without anything that means something else in Lark's syntax."""
    parts = _CHARACTER.findall(told[1:-1])
    outside = parts[:1] == ["^"]
    spans, place = "", int(outside)
    while place < len(parts):
        first = last = _character(parts[place])
        if parts[place + 1 : place + 2] == ["-"] and place + 2 < len(parts):
            place += 2
            last = _character(parts[place])
        if last < first:
            raise ValueError(f"the class {told} has a range that ends before it begins")
        spans += f"\\u{{{ord(first):x}}}-\\u{{{ord(last):x}}}"
        place += 1
    if not spans:
        raise ValueError(f"the class {told} is empty")
    return f"/[{'^' if outside else ''}{spans}]/"


def _character(part: str) -> str:
    """Return the character that a part of a text or class is, which the library has checked."""
    if part[0] != "\\" or part == "\\":
        return part
    if part[1] == "x":
        return chr(int(part[2:], 16))
    if part[1] in "uU":
        raise ValueError(f"{part} and its digits are no character")
    return _CONTROLS.get(part, part[1])


def _plain(found: re.Match[str]) -> str:
    """Return an escape by number as the library understands it: a short one, or the character."""
    if found["dash"]:
        return r"\x2d"
    digits = found["four"] or found["eight"] or found["two"]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or code in _SURROGATES:
        return found[0]
    return chr(code)
