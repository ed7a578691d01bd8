"""Masks that are kept by the state of an expression: they are those that would be computed."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from numpy.typing import NDArray

from onnxport.serving.grammar import GrammarError
from onnxport.serving.structured import sequence
from onnxport.serving.structured.automaton import MOST_AT_ONCE, Automaton
from onnxport.serving.structured.compiler import compile_grammar
from onnxport.serving.structured.expression import UnknownSyntaxError
from onnxport.serving.structured.kept import KeptMasks
from onnxport.serving.structured.sequence import SequenceGrammar
from onnxport.serving.structured.spec import StructuredOutputs
from tests.tiers import examples

from .structured import LIMITS, PROMPT, ids_of, tokenizer, vocabulary

ENDS = tokenizer().eos_token_ids
COUNTED = r"([a-z]{2,8} [0-9]{1,3}[,;] ){60}"

CHARS = st.sampled_from(
    [
        *("a", "e", "h", "s", "t", " ", "é", r"\.", "the ", "sea"),
        *(".", r"\w", r"\d", r"\s", r"\S", r"\n"),
        *("[a-s]", "[^a-s]", r"[\w-]", "[-se]", r"[^\n ]", "[a-zé]"),
    ]
)
COUNTS = st.sampled_from(["*", "+", "?", "{2}", "{3,}", "{0,2}", "{1,30}", "{25}", "{12,40}"])


def _grown(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    groups = st.lists(st.lists(parts, max_size=4).map("".join), min_size=1, max_size=3)
    return st.tuples(groups.map("|".join), st.sampled_from(["({})", "(?:{})"]), COUNTS).map(
        lambda found: found[1].format(found[0]) + found[2]
    )


EXPRESSIONS = st.lists(st.recursive(CHARS, _grown, max_leaves=6), min_size=1, max_size=4)


def kept_and_not(expression: str) -> tuple[SequenceGrammar, SequenceGrammar, SequenceGrammar]:
    """Return three sequences under an expression; the first two share their masks."""
    spec = StructuredOutputs(regex=expression)
    keeping = compile_grammar(spec, vocabulary(), LIMITS, KeptMasks())
    computing = compile_grammar(spec, vocabulary(), LIMITS)
    start = len(PROMPT)
    return keeping.sequence(start), keeping.sequence(start), computing.sequence(start)


@given(EXPRESSIONS.map("".join), st.integers(0, 2**32))
@settings(max_examples=examples(150), deadline=None)
def test_kept_masks_are_those_that_would_be_computed(expression: str, seed: int) -> None:
    """Of an expression at random, along texts at random, with drafts."""
    assume(expression.strip())
    rng = np.random.default_rng(seed)
    *keeping, computing = kept_and_not(expression)
    whole = PROMPT[:]
    wanted = []
    while len(whole) < 50 and not computing.is_complete(whole):
        try:
            wanted.append(ids_of(computing.masks(whole)[0]))
        except GrammarError:  # the library's own limits
            assume(False)
        plain = [one for one in wanted[-1] if one not in ENDS]
        if not plain:
            break
        whole.append(int(rng.choice(plain)))
    for grammar in keeping:
        place = len(PROMPT)
        while place - len(PROMPT) < len(wanted):
            most = len(PROMPT) + len(wanted) - 1 - place
            draft = whole[place : place + int(rng.integers(0, 4))][:most].tolist()
            for number, mask in enumerate(grammar.masks(whole[:place], draft)):
                assert ids_of(mask) == wanted[place - len(PROMPT) + number]
            place += 1 + len(draft)


def test_masks_are_computed_once_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    really = sequence.fill_next_token_bitmask

    def fill(matcher: LLMatcher, rows: NDArray[np.int32], number: int) -> None:
        computed.append(number)
        really(matcher, rows, number)

    monkeypatch.setattr(sequence, "fill_next_token_bitmask", fill)
    first, second, _ = kept_and_not(COUNTED)
    computed.clear()
    first.masks(array("q", [*PROMPT, *tokenizer().encode("sea 12, sea 13, s")]))
    assert computed == [0]
    second.masks(array("q", [*PROMPT, *tokenizer().encode("the 4; t")]))
    assert computed == [0]  # it is in the same state but for the count, whose end is far
    first.masks(
        array(
            "q", [*PROMPT, *tokenizer().encode("sea 12, sea 13, s"), tokenizer().token_to_id("e")]
        )
    )
    assert computed == [0, 0]


def states(expression: str, texts: list[str], longest_token: int = 6) -> list[object]:
    automaton = Automaton(expression, longest_token)
    found = []
    for text in texts:
        places = automaton.after(automaton.start or frozenset(), text.encode())
        found.append(None if places is None else automaton.key(places))
    return found


def test_counts_are_told_apart_only_where_a_token_can_reach_their_end() -> None:
    """With tokens of six characters, `(ab){20}` is one state until three copies are left."""
    found = states("(ab){20}", ["ab" * number for number in range(1, 20)])
    assert len(set(found[:15])) == 1
    assert len(set(found[15:])) == 4
    assert found[14] not in found[15:]
    least, most = states("a{0,20}", ["a", "a" * 9, "a" * 15, "a" * 16]), "a" * 20
    assert least[0] == least[1]
    assert len({*least[1:], *states("a{0,20}", [most])}) == 4


@pytest.mark.parametrize(
    ("expression", "same", "other"),
    [
        ("(ab|cd)*e", ["ab", "cd", "abcd"], ["a", "abc"]),
        (r"\w+@\w+", ["a", "Z_9"], ["a@", "a@b"]),
        (r"[^\d\s]{2,}", ["ab", "a-b"], ["a"]),
        (r"a?[-+]?[0-9]+(\.[0-9]+)?", ["1", "a-12"], ["-", "1.", "1.5"]),
        (".*x", ["a", "b"], ["x"]),
        (r"\s+", [" ", "\t", "\n", "\v", "\f", "\r"], ["\b", "\0"]),
        (r"(a|bcd){20}", ["a", "bcd", "a" * 12], ["a" * 13, "a" * 14]),
    ],
)
def test_states(expression: str, same: list[str], other: list[str]) -> None:
    one = set(states(expression, same))
    assert len(one) == 1
    assert None not in one
    assert not one & set(states(expression, other))


@pytest.mark.parametrize(
    "expression",
    [
        *("(?i)a", "(?P<x>a)", "(?s:.)", r"\ba", "^a", "a$", r"\x41", r"\u{41}", r"\pL", r"\<a"),
        *("a+?", "a*?", "a??", "a{2}?", "a**", "a{2}{3}", "a{ 2 }", "a{,2}", "a{2", "*a"),
        *("[]a]", "[^]a]", "[a&&b]", "[a--b]", "[[:alpha:]]", "[a[b]]", "[a-é]", r"[\w-z]"),
        *("[a^]", "[a~~b]", "(a", "a)", "a]", "a}", "[a", "\\", "a" * 10_001, "(((){64}){64}){64}"),
        "(" * 51 + ")" * 51,
    ],
)
def test_what_is_not_known_is_left_alone(expression: str) -> None:
    with pytest.raises(UnknownSyntaxError):
        Automaton(expression, 6)


def test_an_expression_that_is_not_known_works_without() -> None:
    spec = StructuredOutputs(regex="(?i:sea)")
    assert compile_grammar(spec, vocabulary(), LIMITS, KeptMasks()).kept is None


def test_where_a_text_ends_may_be_unknown() -> None:
    assert states(".*", ["a", "é", "aé", "é a"])[1:] == [None] * 3
    assert states("ab", ["b", "abc"]) == [None, None]  # nowhere
    many = Automaton("|".join(f"a{number:03}" for number in range(MOST_AT_ONCE)), 6)
    assert many.start is None
    branching = Automaton(".*" + "a?" * MOST_AT_ONCE, 6)
    assert branching.start is None
    later = Automaton("b" + "a?" * MOST_AT_ONCE, 6)
    assert later.start is not None
    assert later.after(later.start, b"b") is None


def test_an_end_token_is_not_read_as_text() -> None:
    memory = compile_grammar(StructuredOutputs(regex=".*"), vocabulary(), LIMITS, KeptMasks()).kept
    assert memory is not None
    assert memory.after(memory.start, []) == memory.start
    assert memory.after(memory.start, [min(ENDS)]) is None


def test_the_masks_that_were_used_last_are_kept() -> None:
    kept = KeptMasks(most_bytes=40)
    one, other = Automaton("a*b", 6), Automaton("a*b", 6)
    masks = [np.full(4, number, np.int32) for number in range(4)]  # of 16 bytes
    key = frozenset([1])
    kept.put(one, key, masks[0])
    kept.put(other, key, masks[1])
    masks[0][:] = 9  # what is kept is a copy
    assert kept.get(one, key).tolist() == [0] * 4  # type: ignore[union-attr]
    kept.put(one, key, masks[2])  # instead of the first
    kept.put(one, frozenset([2]), masks[3])
    assert kept.get(other, key) is None
    assert kept.get(one, key).tolist() == [2] * 4  # type: ignore[union-attr]
    kept.put(other, key, masks[1])
    assert kept.get(one, frozenset([2])) is None
    assert kept.get(one, key) is not None
