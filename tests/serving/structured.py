"""A random model that writes what a grammar allows, and checks of what it wrote."""

from __future__ import annotations

import json
from array import array
from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext
from functools import cache
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from numpy.typing import NDArray

from onnxport.serving.grammar import Grammar
from onnxport.serving.row_params import RowParams
from onnxport.serving.sampler import sample
from onnxport.serving.structured.compiler import (
    CompiledGrammar,
    CompileLimits,
    compile_grammar,
)
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.tokenizer import Tokenizer

from .format_checks import format_checker
from .tokenizers_for_tests import EOS, byte_level

PROMPT = array("q", [5, 6, 7])
PADDING = 22  # tokens that the model has beyond its tokenizer
CLOSERS = set('"]}')
LIMITS = CompileLimits()


@cache
def tokenizer() -> Tokenizer:
    fast = byte_level()
    return Tokenizer(fast, frozenset([fast.token_to_id(EOS)]))


@cache
def vocabulary() -> Vocabulary:
    words = tokenizer()
    return Vocabulary.build(words, words.vocab_size + PADDING, words.eos_token_ids)


@cache
def closers() -> NDArray[np.int64]:
    """Return the tokens that end strings, lists and objects, and the text."""
    words = tokenizer()
    found = [
        one
        for one in range(words.vocab_size)
        if (text := words.token_text(one)) and set(text) <= CLOSERS
    ]
    return np.array([*found, *words.eos_token_ids])


def compiled(spec: StructuredOutputs) -> CompiledGrammar:
    return compile_grammar(spec, vocabulary(), LIMITS)


def write(grammar: Grammar, seed: int, most: int = 400, patience: int = 40) -> str | None:
    """Return what a random model writes under a grammar; None: no end after `most` tokens.

    After `patience` tokens what closes things becomes likelier with each token.
    """
    rng = np.random.default_rng(seed)
    tokens, ends = PROMPT[:], tokenizer().eos_token_ids
    while len(tokens) < most:
        logits = rng.standard_normal((1, vocabulary().vocab_size), np.float32) * 3
        logits[0, closers()] += max(0, len(tokens) - patience) * 0.5
        mask = grammar.masks(tokens)[0]
        drawn = sample(logits, [RowParams(1.0, uniform=rng.random(), mask=mask)])
        assert not drawn.invalid, tokenizer().decode(tokens[len(PROMPT) :])
        if drawn.token_ids[0] in ends:
            return tokenizer().decode(tokens[len(PROMPT) :])
        tokens.append(drawn.token_ids[0])
        if grammar.is_complete(tokens):
            return tokenizer().decode(tokens[len(PROMPT) :])
    return None


def assert_valid(schema: Any, text: str, validator: Any = Draft202012Validator) -> None:
    """Assert that a text is JSON that a schema allows, by another implementation, exactly."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    with localcontext(prec=1000, Emax=MAX_EMAX, Emin=MIN_EMIN):
        value = json.loads(text, parse_float=_number)
        validator(exact, format_checker=format_checker(validator.FORMAT_CHECKER)).validate(value)


def _number(text: str) -> Decimal:
    """Return a number exactly, but for those that no computer can write out."""
    _, _, exponent = text.lower().partition("e")
    return Decimal(text) if len(exponent) < 6 else Decimal("1e999")


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether a grammar allows a whole text, in the tokenizer's own tokens, and its end."""
    sequence = grammar.sequence(0)
    tokens = array("q", tokenizer().encode(text, add_special_tokens=False))
    if sequence.num_possible(array("q"), tokens) < len(tokens):
        return False
    return tokenizer().eos_token_ids <= set(ids_of(sequence.masks(tokens)[0]))


def ids_of(mask: NDArray[np.uint32]) -> list[int]:
    """Return the tokens of a mask."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
