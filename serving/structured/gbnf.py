"""llama.cpp's grammars, GBNF, in Lark's syntax as llguidance compiles it.

The library's own translation makes of rules without recursion terminals, which take as many
characters as they can: of `word "x"` with `word ::= [a-z]+` no text could end. Here every rule
stays a rule, and single characters are what is told apart, so that the texts are those of
llama.cpp. The library reads the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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

_ESCAPE = re.compile(
    r"\\(?:u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|x(?P<two>[0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_CHARACTER = re.compile(r"\\x..|\\.|.", re.DOTALL)
_BRACKETS = (r"\[", r"\]")
_SURROGATES = range(0xD800, 0xE000)


def lark_of(text: str) -> str:
    """Return a grammar in Lark's syntax.

    Args:
        text: in GBNF.

    Raises:
        Exception: it is no grammar; says why. It is the library's own.
    """
    rules = GrammarParser().parse(_ESCAPE.sub(_plain, text))
    if "root" not in rules:
        raise ValueError("it has no rule named root")
    names = {name: f"r{number}_{_word(name)}" for number, name in enumerate(rules)}
    names["root"] = "start"
    return "\n".join(
        f"{names[name]}: {_written(rule.alternatives, names)}" for name, rule in rules.items()
    )


def _word(name: str) -> str:
    """Return a name as Lark may have it."""
    return re.sub("[^a-z0-9]", "_", name.lower())


def _written(node: ASTNode, names: Mapping[str, str]) -> str:
    """Return a part of a grammar in Lark's syntax; `names` of rules, by those in the grammar."""
    match node:
        case AlternativeNode():
            return "(" + " | ".join(_written(one, names) for one in node.alternatives) + ")"
        case SequenceNode():
            return " ".join(_written(one, names) for one in node.nodes) or '""'
        case RepetitionNode():
            most = "" if node.max_times is None else node.max_times
            return f"({_written(node.node, names)}){{{node.min_times},{most}}}"
        case RuleRefNode():
            if node.name not in names:
                raise ValueError(f"there is no rule named {node.name!r}")
            return names[node.name]
        case LiteralNode():
            characters = _CHARACTER.findall(node.value)
            return " ".join(map(_literal, characters)) or '""'
        case RegexNode(rx="."):
            return "/(?s:.)/"  # ends of lines, too
        case RegexNode():  # two of these in a row mean something in a class
            escaped = node.rx.replace("&", r"\&").replace("~", r"\~")
            return f"/{escaped}/"
    raise ValueError(f"it has {node}, which is not known")


def _literal(character: str) -> str:
    """Return a text of one character; brackets are escaped in classes alone."""
    return f'"{character[1:] if character in _BRACKETS else character}"'


def _plain(found: re.Match[str]) -> str:
    """Return an escape by number as the library understands it: a short one, or the character."""
    digits = found["four"] or found["eight"] or found["two"]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or code in _SURROGATES:
        return found[0]
    return chr(code)
