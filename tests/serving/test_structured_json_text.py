"""Masks of any JSON object, kept by where a text stands: they are those that would be computed."""

from __future__ import annotations

from array import array
from functools import cache

import numpy as np
import pytest
from llguidance import LLMatcher
from numpy.typing import NDArray

from onnxport.serving.structured import sequence
from onnxport.serving.structured.compiler import CompiledGrammar, compile_grammar
from onnxport.serving.structured.json_text import MOST_INDENT, JsonText, Place
from onnxport.serving.structured.kept import KeptMasks
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.tokenizer import Tokenizer

from .structured import LIMITS, ids_of
from .tokenizers_for_tests import EOS, byte_level

ANY_OBJECT = StructuredOutputs(json_object=True)
WITHOUT_SPACES = StructuredOutputs(json_object=True, disable_any_whitespace=True)
MORE = ("}}", "]}]", "}}}", '"}', '":', '{"', '":[[', "},{", "1.", "0}", "rue}", "\n  ", " " * 8)
STRUCTURE = set('{}[]":,\\ \n') | set("0123456789.eE-+truefalsn")


@cache
def tokenizer() -> Tokenizer:
    """Return a tokenizer with tokens of several parts of JSON, as large ones have them."""
    fast = byte_level()
    fast.add_tokens(list(MORE))
    return Tokenizer(fast, frozenset([fast.token_to_id(EOS)]))


@cache
def vocabulary() -> Vocabulary:
    words = tokenizer()
    return Vocabulary.build(words, words.vocab_size, words.eos_token_ids)


def keeping(spec: StructuredOutputs, masks: KeptMasks | None = None) -> CompiledGrammar:
    return compile_grammar(spec, vocabulary(), LIMITS, masks or KeptMasks())


def text_of(token_id: int) -> str:
    return tokenizer().decode([token_id])


def weights() -> NDArray[np.float64]:
    """Return how likely a random model writes each token: bytes that matter to JSON more often."""
    found = np.full(vocabulary().vocab_size, 0.2)
    for one in range(tokenizer().vocab_size):
        if set(text_of(one)) <= STRUCTURE:
            found[one] = 4.0
    return found


@pytest.mark.parametrize("spec", [ANY_OBJECT, WITHOUT_SPACES])
@pytest.mark.parametrize("fondness", [0.3, 3.0, 30.0])
def test_kept_masks_are_those_that_would_be_computed(
    spec: StructuredOutputs, fondness: float
) -> None:
    """Along texts at random, that like brackets and spaces more or less; with drafts."""
    rng = np.random.default_rng(int(10 * fondness))
    kept, computing = keeping(spec), compile_grammar(spec, vocabulary(), LIMITS)
    likely = weights()
    for one in range(tokenizer().vocab_size):
        if set(text_of(one)) <= set("{}[], \n"):
            likely[one] *= fondness
    for _ in range(12):
        reference, grammar = computing.sequence(0), kept.sequence(0)
        tokens, wanted = array("q"), []
        while len(tokens) < 120:
            wanted.append(ids_of(reference.masks(tokens)[0]))
            plain = [token for token in wanted[-1] if token not in tokenizer().eos_token_ids]
            if not plain:
                break
            chances = likely[plain] / likely[plain].sum()
            tokens.append(int(rng.choice(plain, p=chances)))
        place = 0
        while place < len(wanted):
            most = len(wanted) - 1 - place
            draft = tokens[place : place + int(rng.integers(0, 4))][:most].tolist()
            for number, mask in enumerate(grammar.masks(tokens[:place], draft)):
                assert ids_of(mask) == wanted[place + number], tokenizer().decode(
                    tokens[: place + number]
                )
            place += 1 + len(draft)


def test_texts_that_stand_alike_share_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    really = sequence.fill_next_token_bitmask

    def fill(matcher: LLMatcher, rows: NDArray[np.int32], number: int) -> None:
        computed.append(number)
        really(matcher, rows, number)

    monkeypatch.setattr(sequence, "fill_next_token_bitmask", fill)
    kept = keeping(ANY_OBJECT)

    def number_computed(text: str) -> int:
        computed.clear()
        kept.sequence(0).masks(array("q", tokenizer().encode(text)))
        return len(computed)

    assert number_computed('{"sea": [1, "de') == 1
    assert number_computed('{"a":{"b":0},"wide" : [[], "the \\" sea') == 0
    assert number_computed('{"sea": "de') == 1  # in an object, not in a list
    assert number_computed('{"a": "de') == 0


PLACES = JsonText(longest_token=6, most_closed=1)  # of a tokenizer that is simpler


def key_of(text: str | bytes) -> Place | None:
    place = PLACES.start
    assert place is not None
    found = PLACES.after(place, text if isinstance(text, bytes) else text.encode())
    return None if found is None else PLACES.key(found)


@pytest.mark.parametrize(
    ("same", "other"),
    [
        (["{", "\n {"], ["", " ", "{ ", '{"', "{}"]),
        (['{"', '{"a', '{"\\n', '{"é'], ['{"\\', '{"a"', '{"a":"', b'{"\xc3']),
        (['{"a":1', '{"b" : -12'], ['{"a":0', '{"a":-', '{"a":1.', '{"a":1.0', '{"a":1e', '{"a":']),
        (['{"a":1e5', '{"a":0.5E-17'], ['{"a":1e-', '{"a":15', '{"a":1.5']),
        (['{"a":tru', '{"a":fals'], ['{"a":true', '{"a":tr', '{"a":nul']),
        (['{"a":null', '{"a":{}', '{"a":""'], ['{"a":[]]', '{"a":[', '{"a":0', '{"a":"']),
        (['{"a":[1,', '{"a":[null,'], ['{"a":[', '{"a":', '{"a":1,', '{"a":[[1,']),
        (["{} ", "{" + '"a":1} '], ["{}", "{ ", "{}\n", "{}\n "]),
        (["{\n ", "{\n\t", "{\n\n "], ["{ ", "{\n", "{\n\n", "{"]),
    ],
)
def test_places(same: list[str], other: list[str]) -> None:
    one = set(map(key_of, same))
    assert len(one) == 1
    assert None not in one
    assert not one & set(map(key_of, other))


@pytest.mark.parametrize(
    "text",
    [
        *('"', "[", "1", "}", "{1", "{,", '{"a",', '{"a":]', '{"a":1]', '{"a":[1}', "{}}", "{},"),
        *('{"\\u', '{"a\n', b'{"\x80', b'{"\xff', b'{"\xc3a', '{"a":01', '{"a":+1', '{"a":1..'),
        *('{"a":tre', '{"a":nult', '{"a":-,', '{"a":1.}', '{"a":{"b":1,}', "{" + " " * 2),
        *("{\t", "{\r", "{ \n", "{\n\n\n", "{\n \n", "{\n" + " " * 21, "{\n\n" + "\t" * 21),
    ],
)
def test_of_what_is_no_json_nothing_is_known(text: str | bytes) -> None:
    assert key_of(text) is None


def test_what_no_token_reaches_is_not_told_apart() -> None:
    """Brackets that no token ends, and the end of whitespace that no token comes to."""
    deep = '{"a":' * 9
    assert key_of(deep + "[[[") == key_of('{"a":[' + "[[[")
    assert key_of(deep + "[[") != key_of('{"a":' + "[[[[")
    assert key_of(deep + "[{") != key_of(deep + "{[")
    near = MOST_INDENT - 6
    spaces = [key_of("{\n" + " " * number) for number in range(MOST_INDENT + 1)]
    assert len(set(spaces[1 : near + 1])) == 1
    assert len(set(spaces)) == 2 + MOST_INDENT - near


def test_tokens_tell_how_much_they_end() -> None:
    texts = map(text_of, range(tokenizer().vocab_size))
    ends = [sum(text.count(bracket) for bracket in "]}") for text in texts]
    assert max(ends) == vocabulary().most_closed == 3


@pytest.mark.parametrize(
    ("spec", "is_kept"),
    [
        (ANY_OBJECT, True),
        (WITHOUT_SPACES, True),
        (StructuredOutputs(json={"type": "object", "title": "anything"}), True),
        (StructuredOutputs(json_object=True, whitespace_pattern=" ?"), False),
        (StructuredOutputs(json={"type": "object", "maxProperties": 1}), False),
        (StructuredOutputs(json={"type": "array"}), False),
        (StructuredOutputs(json={}), False),
        (StructuredOutputs(json="true"), False),
    ],
)
def test_only_masks_of_any_object_are_kept(spec: StructuredOutputs, is_kept: bool) -> None:
    assert (keeping(spec).kept is not None) == is_kept
