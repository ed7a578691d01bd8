"""Compiling a grammar, now and here, within limits.

llguidance, and what is built on it, is imported with the first grammar: most processes see none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.serving.grammar import GrammarError
from onnxport.serving.structured.automaton import Automaton
from onnxport.serving.structured.expression import UnknownSyntaxError
from onnxport.serving.structured.json_text import JsonText
from onnxport.serving.structured.kept import KeptMasks, MaskMemory, Places
from onnxport.serving.structured.spec import NAMES, StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from onnxport.serving.structured.sequence import SequenceGrammar
    from onnxport.serving.structured.source import Content

logger = logging.getLogger(__name__)

NO_TOKENS = array("q")
ROW = 100  # small expressions that are looked at together
# What the library advises there cannot be done by a request.
NOT_APART = "oneOf constraints are not supported"
TOLD_INSTEAD = "oneOf has alternatives that are not visibly exclusive; write anyOf"
NOTHING_FITS = "NoExtension"  # why the library stops where no token may come, and no end either


class TooLateError(RequestError):
    """It was not compiled in time, and so no further; another time it may take less.

    Attributes:
        until_s: time of the monotonic clock; it is not tried again before.
    """

    def __init__(self, message: str, param: str, until_s: float) -> None:
        super().__init__(message, param)
        self.until_s = until_s


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What compiling may take.

    Attributes:
        timeout_s: how long a request waits for its grammar.
        refused_s: how long one that took longer is refused then, without being tried again.
        num_threads: grammars that are compiled at once.
        max_left: of those that took too long and are still compiled, while others take their turn.
        max_entries: grammars that are kept.
        max_cached_chars: characters of their texts, all together.
        max_grammar_size: symbols of one grammar.
        max_lexer_states: states of the automaton of one sequence, 1 to 2 kB each.
        max_step_items: parser's items of one mask.
        max_row_items: parser's items of one position, some four an optional property.
        max_gbnf_row_items: those of a grammar in GBNF, which characters and rules that go on at
            their end make more and more; a long one may have one for each four of its characters.
    """

    timeout_s: float = 10.0
    refused_s: float = 60.0
    num_threads: int = 2
    max_left: int = 4
    max_entries: int = 128
    max_cached_chars: int = 1 << 22
    max_grammar_size: int = 200_000
    max_lexer_states: int = 50_000
    max_step_items: int = 50_000
    max_row_items: int = 50_000
    max_gbnf_row_items: int = 1000


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that any number of sequences can follow."""

    vocabulary: Vocabulary
    template: LLMatcher  # at the beginning; never moved
    kept: MaskMemory | None = None
    goes_back: bool = True  # whether the library can take tokens back
    is_empty: bool = False  # whether only the empty text fits

    def sequence(self, num_prompt_tokens: int) -> SequenceGrammar:
        """Return the grammar of a sequence that begins with a prompt of so many tokens."""
        from onnxport.serving.structured.sequence import SequenceGrammar

        matcher = self.template.deep_copy()
        return SequenceGrammar(
            matcher, self.vocabulary, num_prompt_tokens, self.kept, goes_back=self.goes_back
        )


def compile_grammar(
    spec: StructuredOutputs,
    vocabulary: Vocabulary,
    limits: CompileLimits,
    masks: KeptMasks | None = None,
) -> CompiledGrammar:
    """Compile a grammar, now and here.

    Args:
        spec: the grammar.
        vocabulary: of the model.
        limits: of what compiling may take.
        masks: where masks of this vocabulary are kept; None: they are not.

    Raises:
        RequestError: it is not valid, too large, or nothing fits it.
        TooLateError: it takes too long.
    """
    from onnxport.serving.structured.source import grammar_of, is_gbnf

    name, param = NAMES[spec.kind], spec.where
    # What is wrong with a form is not known before the reasoning ends, so it is looked at alone;
    # so are those of calls and of an answer, of which either may hide what is wrong with the other.
    alone: list[CompiledGrammar] = []
    if spec.thought is not None:
        alone = [compile_grammar(replace(spec, thought=None), vocabulary, limits)]
    elif spec.calls is not None:
        forms = (replace(spec, calls=None), spec.calls)
        alone = [compile_grammar(each, vocabulary, limits) for each in forms]
    elif spec.kind == "structural_tag":
        _check_contents(spec, vocabulary, limits)
    grammar = grammar_of(spec, vocabulary.names)
    if spec.kind == "grammar" and is_gbnf(spec.text):
        most = max(limits.max_gbnf_row_items, len(grammar) // 4)
        limits = replace(limits, max_row_items=min(limits.max_row_items, most))
    matcher = _matcher(grammar, name, param, vocabulary, limits)
    kept = None
    if masks is not None and (places := _places_of(spec, vocabulary)):
        kept = MaskMemory(places, vocabulary.tokens, masks)
    compiled = CompiledGrammar(vocabulary, matcher, kept)
    first_ids = _first_ids(compiled, name, param)
    return replace(
        compiled,
        goes_back=all(each.goes_back for each in alone)
        and _goes_back(matcher.deep_copy(), first_ids),
        is_empty=set(first_ids.tolist()) <= set(vocabulary.tokens.eos_tokens),
    )


def _check_contents(spec: StructuredOutputs, vocabulary: Vocabulary, limits: CompileLimits) -> None:
    """Refuse a structural tag with a content that nothing fits, which shows in a text's middle.

    Small expressions are looked at many at once, and one by one only where something is wrong.

    Raises:
        RequestError: says where.
        TooLateError: nobody waits any more, so that no thread goes on for nobody.
    """
    from onnxport.serving.structured.source import contents_of, row_of

    name, param = NAMES[spec.kind], spec.where
    until = time.monotonic() + limits.timeout_s

    def check(grammar: str, what: str) -> None:
        if (now := time.monotonic()) > until:
            told = f"{too_long(spec, limits)}. It is refused for {limits.refused_s:.0f} s now"
            raise TooLateError(told, param, now + limits.refused_s)
        matcher = _matcher(grammar, what, param, vocabulary, limits)
        _first_ids(CompiledGrammar(vocabulary, matcher), what, param)

    seen: set[str] = set()
    small: list[tuple[str, Content]] = []
    for each in contents_of(spec, vocabulary.names):
        if each.grammar in seen:
            continue
        seen.add(each.grammar)
        if each.small is None:
            check(each.grammar, f"{each.place} of {name}")
        else:
            small.append((each.small, each))
    for start in range(0, len(small), ROW):
        row = small[start : start + ROW]
        with contextlib.suppress(RequestError):
            check(row_of(told for told, _ in row), name)
            continue
        for _, each in row:  # which of them is wrong, unless all together are too much
            check(each.grammar, f"{each.place} of {name}")


def too_long(spec: StructuredOutputs, limits: CompileLimits) -> str:
    """Say that a grammar was not compiled in time."""
    return f"{NAMES[spec.kind]} took more than {limits.timeout_s} s to compile; make it smaller"


def _matcher(
    grammar: str, name: str, param: str, vocabulary: Vocabulary, limits: CompileLimits
) -> LLMatcher:
    """Return what follows a grammar, at its beginning.

    Args:
        grammar: as llguidance has it.
        name: what errors call it.
        param: the field of a request that they name.
        vocabulary: of the model.
        limits: of what compiling may take.

    Raises:
        RequestError: it is not valid, or too large.
    """
    from llguidance import LLMatcher, LLParserLimits

    parser_limits = LLParserLimits(
        step_max_items=limits.max_step_items,
        max_items_in_row=limits.max_row_items,
        max_lexer_states=limits.max_lexer_states,
        max_grammar_size=limits.max_grammar_size,
        verbose_errors=False,
    )
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=parser_limits)
    reason = (
        matcher.get_error() if matcher.is_error() else "; ".join(matcher.get_grammar_warnings())
    )
    if reason:
        told = TOLD_INSTEAD if NOT_APART in reason else _short(reason)
        raise RequestError(f"{name} cannot be compiled: {told}", param)
    return matcher


def _first_ids(compiled: CompiledGrammar, name: str, param: str) -> NDArray[np.int64]:
    """Return the tokens that a text may begin with.

    Args:
        compiled: a grammar.
        name: what errors call it.
        param: the field of a request that they name.

    Raises:
        RequestError: nothing fits it, or it is too much.
    """
    first = compiled.sequence(0)
    try:
        [mask] = first.masks(NO_TOKENS).copy()
        possible = mask.any() or first.is_complete(NO_TOKENS)
    except GrammarError as error:
        if NOTHING_FITS in str(error):
            raise RequestError(f"no text fits {name}; correct it", param) from error
        raise RequestError(f"{name} is too complex: {_short(str(error))}", param) from error
    if not possible:
        raise RequestError(f"no text fits {name}; correct it", param)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _goes_back(matcher: LLMatcher, possible: NDArray[np.int64]) -> bool:
    """Whether a matcher can take a token back, which some grammars in Lark's syntax cannot.

    Args:
        matcher: at the beginning; nobody else's.
        possible: the tokens that may come first.
    """
    if len(possible) and matcher.try_consume_tokens([int(possible[0])]):
        matcher.rollback(1)
    return not matcher.is_error()


def _places_of(spec: StructuredOutputs, vocabulary: Vocabulary) -> Places | None:
    """Return what tells the states of a grammar apart, where that is known."""
    if spec.thought is not None or spec.calls is not None:
        return None
    if spec.kind == "json" and spec.whitespace_pattern is None:
        any_object = json.loads(spec.text) == {"type": "object"}
        most_closed = vocabulary.most_closed
        return JsonText(vocabulary.longest_token, most_closed) if any_object else None
    if spec.kind != "regex":
        return None
    try:
        return Automaton(spec.text, vocabulary.longest_token)
    except UnknownSyntaxError as error:
        logger.debug("masks of a regular expression are not kept: %s", error)
        return None


def _short(reason: str) -> str:
    """Return a message of llguidance in one line."""
    return " ".join(reason.split())[:400]
