"""Where a sequence stands in its grammar: against a slow reference, with drafts, at limits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from onnxport.errors import RequestError
from onnxport.serving.grammar import ForbiddenTokenError, GrammarError
from onnxport.serving.structured.compiler import CompileLimits, compile_grammar
from onnxport.serving.structured.sequence import SequenceGrammar
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.tokenizer import Tokenizer
from tests.tiers import examples

from .structured import LIMITS, PADDING, PROMPT, compiled, ids_of, tokenizer, vocabulary
from .tokenizers_for_tests import EOS, byte_fallback, byte_level

TEXTS = ("the sea", "the seat", "théâtre", "日本語", "{1}", "{2}")
CHOICE = StructuredOutputs(choice=TEXTS)
NUMBERS = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "maxItems": 4})
FORMS = st.sampled_from([CHOICE, NUMBERS, StructuredOutputs(regex="(ab|é|the )*x?")])
END = min(tokenizer().eos_token_ids)


def bytes_of(token_id: int) -> bytes:
    return tokenizer()._bytes_of(token_id)


def possible(written: bytes) -> set[int]:
    """Return which tokens may follow, by looking at every one and every choice."""
    whole = [text.encode() for text in TEXTS]
    return {
        token_id
        for token_id in range(tokenizer().vocab_size)
        if token_id != END
        and any(text.startswith(written + (bytes_of(token_id) or b"\xff")) for text in whole)
    } | ({END} if written in whole else set())


@given(st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None)
def test_masks_against_a_slow_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grammar = compiled(CHOICE).sequence(len(PROMPT))
    tokens, written = PROMPT[:], b""
    while True:
        wanted = possible(written)
        found = {
            one for one in range(vocabulary().vocab_size) if grammar.num_possible(tokens, [one])
        }
        assert found == wanted
        allowed = ids_of(grammar.masks(tokens)[0])
        assert set(allowed) == wanted
        assert grammar.is_complete(tokens) == (wanted == {END})
        token_id = int(rng.choice(allowed))
        if token_id == END:
            assert written.decode() in TEXTS
            return
        tokens.append(token_id)
        written += bytes_of(token_id)


def walk(grammar: SequenceGrammar, tokens: array[int], rng: np.random.Generator) -> list[list[int]]:
    """Write random tokens to the end, at most 40; returns what each mask allowed."""
    allowed = []
    while len(tokens) < 40 and (not tokens or tokens[-1] != END):
        allowed.append(ids_of(grammar.masks(tokens)[0]))
        tokens.append(int(rng.choice(allowed[-1])))
    return allowed


@given(FORMS, st.integers(0, 2**32), st.lists(st.integers(0, 6), min_size=1, max_size=12))
@settings(max_examples=examples(60), deadline=None)
def test_drafts_leave_no_trace(form: StructuredOutputs, seed: int, lengths: list[int]) -> None:
    """Masks after each token of a draft are those without one; a wrong draft changes nothing."""
    rng = np.random.default_rng(seed)
    whole = PROMPT[:]
    wanted = walk(compiled(form).sequence(len(PROMPT)), whole, rng)
    grammar = compiled(form).sequence(len(PROMPT))
    place = len(PROMPT)
    for length in [*lengths, 0]:
        if place >= len(whole):
            break
        wrong = rng.integers(0, vocabulary().vocab_size + 99, 4).tolist()
        wrong = wrong[: grammar.num_possible(whole[:place], wrong)]
        grammar.masks(whole[:place], wrong)
        draft = whole[place : place + length].tolist()
        assert grammar.num_possible(whole[:place], draft) == len(draft)
        masks = grammar.masks(whole[:place], draft)
        assert masks.shape == (len(draft) + 1, -(-vocabulary().vocab_size // 32))
        for number, mask in enumerate(masks):
            index = place - len(PROMPT) + number
            if index < len(wanted):
                assert ids_of(mask) == wanted[index]
        place += int(rng.integers(0, len(draft) + 1)) or 1


@given(FORMS, st.integers(0, 2**32), st.integers(0, 12))
@settings(max_examples=examples(60), deadline=None)
def test_what_is_forced_is_possible_and_leaves_no_trace(
    form: StructuredOutputs, seed: int, most: int
) -> None:
    rng = np.random.default_rng(seed)
    whole = PROMPT[:]
    wanted = walk(compiled(form).sequence(len(PROMPT)), whole, rng)
    grammar = compiled(form).sequence(len(PROMPT))
    for place, allowed in enumerate(wanted, len(PROMPT)):
        found = grammar.forced(whole[:place], most)
        assert len(found) <= most
        assert grammar.num_possible(whole[:place], found) == len(found)
        assert ids_of(grammar.masks(whole[:place])[0]) == allowed
        if form is CHOICE and found:  # no text goes on in another way
            written = b"".join(map(bytes_of, whole[len(PROMPT) : place]))
            forced = written + b"".join(map(bytes_of, found))
            left = [text.encode() for text in TEXTS if text.encode().startswith(written)]
            assert all(text.startswith(forced) for text in left)


def forced(form: StructuredOutputs, text: str, most: int = 99) -> str:
    """What has to follow a text."""
    written = array("q", tokenizer().encode(text, add_special_tokens=False))
    found = compiled(form).sequence(0).forced(written, most)
    return tokenizer().decode(found)


def test_what_is_forced() -> None:
    keys = {"type": "object", "properties": {"the sea": {"type": "null"}}, "required": ["the sea"]}
    form = StructuredOutputs(json=keys | {"additionalProperties": False})
    assert forced(form, '{"') == 'the sea"'  # there may be white space behind it
    assert forced(CHOICE, "{") == ""
    assert forced(CHOICE, "日") == "本語"
    assert forced(CHOICE, "日", 0) == ""
    assert forced(CHOICE, "日本語") == ""
    assert forced(NUMBERS, "[1") == ""
    assert forced(NUMBERS, "x") == ""  # which the grammar forbids


def test_tokens_that_the_model_lacks_are_not_forced() -> None:
    words = tokenizer()
    text = words.encode("the sea", add_special_tokens=False)
    assert len(text) > 1
    read = Vocabulary.build(words, max(text), words.eos_token_ids)
    form = StructuredOutputs(choice=("the sea",))
    found = compile_grammar(form, read, LIMITS).sequence(0).forced(array("q"), 99)
    assert all(one < max(text) for one in found)


def test_tokens_may_come_several_at_a_time() -> None:
    text = array("q", tokenizer().encode("[1, 22]", add_special_tokens=False))
    grammar = compiled(NUMBERS).sequence(0)
    assert not grammar.is_complete(text[:-1])
    assert grammar.is_complete(text)
    assert grammar.is_complete(array("q", [*text, END]))


def test_a_forbidden_token_is_named_however_often() -> None:
    """Those that came with it, and may, are not read twice."""
    text = tokenizer().encode("[12", add_special_tokens=False)
    grammar = compiled(NUMBERS).sequence(0)
    tokens = array("q", [*text, text[0]])
    for _ in range(3):
        with pytest.raises(ForbiddenTokenError, match=f"token {text[0]} came, which the grammar"):
            grammar.masks(tokens)
        with pytest.raises(ForbiddenTokenError):
            grammar.is_complete(tokens)
        assert grammar.num_possible(tokens, text[1:]) == 0
    assert grammar.num_possible(array("q", text), text[1:2]) == 1


def test_copies_do_not_share_a_state() -> None:
    grammar = compiled(NUMBERS)
    text = array("q", tokenizer().encode("[1", add_special_tokens=False))
    first, second = grammar.sequence(0), grammar.sequence(0)
    before = ids_of(second.masks(array("q"))[0])
    first.masks(text)
    assert ids_of(second.masks(array("q"))[0]) == before
    assert ids_of(grammar.sequence(0).masks(array("q"))[0]) == before


@pytest.mark.parametrize("padding", [0, 1, PADDING, 64])
def test_tokens_beyond_the_tokenizer_are_never_allowed(padding: int) -> None:
    words = tokenizer()
    size = words.vocab_size + padding
    read = Vocabulary.build(words, size, words.eos_token_ids)
    anything = StructuredOutputs(regex="(?s).*")
    grammar = compile_grammar(anything, read, LIMITS).sequence(0)
    mask = grammar.masks(array("q"))
    assert mask.shape == (1, -(-size // 32))
    assert max(ids_of(mask[0])) < words.vocab_size
    assert len(ids_of(mask[0])) > 200


def test_a_model_may_have_fewer_tokens_than_its_tokenizer() -> None:
    words = tokenizer()
    size = words.vocab_size - 30
    read = Vocabulary.build(words, size, words.eos_token_ids)
    grammar = compile_grammar(StructuredOutputs(regex="(?s).*"), read, LIMITS).sequence(0)
    mask = grammar.masks(array("q"))
    assert mask.shape == (1, -(-size // 32))
    assert max(ids_of(mask[0])) < size


def test_each_end_token_ends() -> None:
    words = tokenizer()
    ends = {END, 5, 9, words.vocab_size + 1}  # the last one is not the tokenizer's
    read = Vocabulary.build(words, words.vocab_size + 8, ends)
    compiled_once = compile_grammar(StructuredOutputs(regex="[0-9]"), read, LIMITS)
    digit = words.encode("7", add_special_tokens=False)
    assert not ends & set(ids_of(compiled_once.sequence(0).masks(array("q"))[0]))
    assert set(ids_of(compiled_once.sequence(0).masks(array("q", digit))[0])) == ends


def test_a_model_without_an_end_token() -> None:
    words = Tokenizer(byte_level())
    read = Vocabulary.build(words, words.vocab_size, ())
    assert not read.has_end
    digit, comma = (words.encode(char, add_special_tokens=False)[0] for char in "7,")
    grammar = compile_grammar(StructuredOutputs(regex="[0-9]{1,2}"), read, LIMITS).sequence(0)
    assert not grammar.is_complete(array("q", [digit]))
    assert comma not in ids_of(grammar.masks(array("q", [digit]))[0])
    assert max(ids_of(grammar.masks(array("q", [digit]))[0])) < words.vocab_size
    assert grammar.is_complete(array("q", [digit, digit]))


def test_byte_fallback() -> None:
    """A tokenizer whose words begin with ▁, with a token for each byte."""
    fast = byte_fallback()
    words = Tokenizer(fast, frozenset({fast.token_to_id(EOS)}))
    read = Vocabulary.build(words, words.vocab_size + 3, words.eos_token_ids)
    form = StructuredOutputs(choice=("the sea", " the 日"))
    rng = np.random.default_rng(0)
    texts = set()
    for _ in range(30):
        grammar = compile_grammar(form, read, LIMITS).sequence(0)
        tokens = array("q")
        while not grammar.is_complete(tokens):
            tokens.append(int(rng.choice(ids_of(grammar.masks(tokens)[0]))))
            if tokens[-1] in words.eos_token_ids:
                break
        pieces = words.detokenizer([words.encode("p")[0]])
        texts.add("".join([*map(pieces.add, tokens), pieces.finish()]))
    assert texts == {"the sea", " the 日"}


def angle_brackets(kind: str) -> Tokenizer:
    """A tokenizer with added tokens in angle brackets: three texts, and a special one."""
    fast = byte_level() if kind == "byte-level" else byte_fallback()
    fast.add_tokens([AddedToken(each, special=False) for each in ADDED[:3]])
    fast.add_special_tokens([AddedToken(ADDED[3], special=True)])
    return Tokenizer(fast, frozenset([fast.token_to_id(EOS)]))


ADDED = ("<tool_call>", "<think it>", "<｜é▁>", "<|special|>")


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_added_tokens_that_are_text_may_be_written(kind: str) -> None:
    """Models are trained to write `<tool_call>` as one token, and do badly at spelling it out."""
    words = angle_brackets(kind)
    ids = [words.token_to_id(each) for each in ADDED]
    read = Vocabulary.build(words, words.vocab_size + 3, words.eos_token_ids)
    form = StructuredOutputs(choice=tuple(f"{each}\n" for each in ADDED))
    first = set(ids_of(compile_grammar(form, read, LIMITS).sequence(0).masks(array("q"))[0]))
    assert first >= set(ids[:2])
    assert ids[3] not in first
    assert (ids[2] in first) == (kind == "byte-level")  # the other's ▁ is a space
    for index in (0, 1):
        grammar = compile_grammar(form, read, LIMITS).sequence(0)
        tokens = array("q", [ids[index]])
        left = {words.token_text(one) for one in ids_of(grammar.masks(tokens)[0])}
        assert left == {"\n"}
    text = compile_grammar(StructuredOutputs(regex="(?s).*"), read, LIMITS).sequence(0)
    anything = set(ids_of(text.masks(array("q"))[0]))
    assert {*ids[:3], *words.eos_token_ids} <= anything
    assert ids[3] not in anything


def test_an_end_token_is_no_text_whatever_its_file_says() -> None:
    words = angle_brackets("byte-level")
    end = words.token_to_id("<tool_call>")
    assert end is not None
    read = Vocabulary.build(words, words.vocab_size, {end})
    form = StructuredOutputs(choice=("<tool_call>\n",))
    grammar = compile_grammar(form, read, LIMITS).sequence(0)
    assert end not in ids_of(grammar.masks(array("q"))[0])


def test_an_end_token_that_is_text_ends_only_where_the_form_may_end() -> None:
    """Such as an end of a line: whatever it would spell, the text ends with it."""
    words = tokenizer()
    [line] = words.encode("\n", add_special_tokens=False)
    read = Vocabulary.build(words, words.vocab_size, {*words.eos_token_ids, line})
    assert read.text_ends == (line,)
    for expression, text in (("a\n{3}b", "a"), ("(?s).{2}", "a")):
        grammar = compile_grammar(StructuredOutputs(regex=expression), read, LIMITS).sequence(0)
        tokens = array("q", words.encode(text, add_special_tokens=False))
        assert line not in ids_of(grammar.masks(tokens)[0])
    form = StructuredOutputs(regex="a(\nb)?")
    grammar = compile_grammar(form, read, LIMITS).sequence(0)
    assert line in ids_of(grammar.masks(array("q", words.encode("a")))[0])


@pytest.mark.parametrize("attribute", ["stop=/[e ]/", "max_tokens=3"])
def test_drafts_where_the_library_cannot_go_back(attribute: str) -> None:
    text = f'start: a "." b\na[{attribute}]: /[a-z ]+/\nb: /[0-9]{{2}}/'
    form = StructuredOutputs(grammar=text)
    rng = np.random.default_rng(4)
    for _ in range(5):
        whole = PROMPT[:]
        wanted = walk(compiled(form).sequence(len(PROMPT)), whole, rng)
        assert not compiled(form).goes_back
        grammar = compiled(form).sequence(len(PROMPT))
        for place in range(len(PROMPT), len(whole)):
            draft = whole[place : place + 3].tolist()
            wrong = rng.integers(0, vocabulary().vocab_size, 3).tolist()
            grammar.num_possible(whole[:place], wrong)
            assert grammar.num_possible(whole[:place], draft) == len(draft)
            for number, mask in enumerate(grammar.masks(whole[:place], draft)):
                index = place - len(PROMPT) + number
                if index < len(wanted):
                    assert ids_of(mask) == wanted[index]


def test_other_tokenizers_are_refused() -> None:
    """Pieces of words whose bytes are not in their spelling cannot be matched."""
    fast = FastTokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(RequestError, match="tokenizer does not allow") as caught:
        Vocabulary.build(Tokenizer(fast, frozenset({0})), 3, {0})
    assert caught.value.param == "structured_outputs"


def broken(tokens: Sequence[int]) -> tuple[SequenceGrammar, array[int]]:
    """Return a grammar that runs out of states while it reads."""
    limits = replace(CompileLimits(), max_lexer_states=60)
    form = StructuredOutputs(regex="(a|b)*a(a|b){14}")
    grammar = compile_grammar(form, vocabulary(), limits).sequence(0)
    return grammar, array("q", tokens)


def test_a_limit_in_the_middle() -> None:
    letters = [tokenizer().encode(char, add_special_tokens=False)[0] for char in "ab"]
    grammar, tokens = broken([])
    error = None
    for token_id in np.random.default_rng(0).choice(letters, 300).tolist():
        try:
            grammar.masks(tokens)
        except GrammarError as reached:
            error = str(reached)
            break
        tokens.append(token_id)
    assert error is not None
    assert len(tokens) > 0
    assert "\n" not in error
    assert grammar.num_possible(tokens, letters) == 0
    for _ in range(2):
        with pytest.raises(GrammarError):
            grammar.masks(tokens)
        with pytest.raises(GrammarError):
            grammar.is_complete(tokens)


@given(st.integers(0, 2**32), FORMS)
@settings(max_examples=examples(60), deadline=None)
def test_forks_go_on_on_their_own(seed: int, form: StructuredOutputs) -> None:
    """Each allows what one allows that has read the same tokens by itself."""
    rng = np.random.default_rng(seed)
    paths = [(compiled(form).sequence(len(PROMPT)), PROMPT[:])]
    for _ in range(12):
        grammar, tokens = paths[rng.integers(len(paths))]
        if grammar.is_complete(tokens):
            continue
        mask = grammar.masks(tokens)[0]
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: vocabulary().vocab_size]
        fork, longer = grammar.fork(), tokens[:]
        longer.append(int(rng.choice(np.flatnonzero(bits))))
        paths.append((fork, longer))
        for each, own in paths:
            alone = compiled(form).sequence(len(PROMPT))
            assert each.is_complete(own) == alone.is_complete(own)
            if not alone.is_complete(own):
                assert each.masks(own).tolist() == alone.masks(own).tolist()
