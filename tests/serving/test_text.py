"""Tokens to text: detokenizers, stop strings, the tokenizer's wrapper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as FastTokenizer

from onnxport.errors import ArtifactError, CapacityError
from onnxport.serving.detokenizer import ByteDetokenizer, WindowDetokenizer
from onnxport.serving.text import TextStream, find_stop, longest_beginning
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.tokenizers_for_tests import EOS, TOOL, byte_fallback, byte_level
from tests.tiers import examples

BYTES = Tokenizer(byte_level())
FALLBACK = Tokenizer(byte_fallback())
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def pieces(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def windowed(ids: Sequence[int]) -> list[str]:
    detokenizer = WindowDetokenizer(BYTES.decode)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def fallback_ids(text: str) -> list[int]:
    """Every character as its bytes."""
    ids = [FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    return [token_id for token_id in ids if token_id is not None]


def test_the_right_detokenizer_is_chosen() -> None:
    assert isinstance(BYTES.detokenizer([]), ByteDetokenizer)
    assert isinstance(FALLBACK.detokenizer([]), WindowDetokenizer)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(st.sampled_from(["a", " b", "é", "猫", "🙂", "🎉", "\n", " the"]), max_size=12),
    st.data(),
)
def test_an_answer_may_begin_in_the_middle_of_a_character(
    texts: list[str], data: st.DataObject
) -> None:
    """What a prompt ends with of one belongs to the answer; nothing else is touched by it."""
    text = "".join(texts)
    for tokenizer, ids in ((BYTES, BYTES.encode(text)), (FALLBACK, FALLBACK.encode(text))):
        cut = data.draw(st.integers(0, len(ids)))
        before = tokenizer.decode_prompt(ids[:cut])
        assert REPLACEMENT not in before
        whole = before + "".join(pieces(tokenizer, ids[cut:], ids[:cut]))
        assert whole == tokenizer.decode(ids)


def test_tokens_that_are_left_out_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not let to end repeats its end token; nothing is decoded for that."""
    decoded: list[int] = []
    plain = Tokenizer.decode

    def decode(self: Tokenizer, ids: Sequence[int], **options: bool) -> str:
        decoded.append(len(ids))
        return plain(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", decode)
    words, end = FALLBACK.encode("a b", add_special_tokens=False), FALLBACK.token_to_id(EOS) or 0
    ids = [words[0], *[end] * 500, words[-1]]
    detokenizer = FALLBACK.detokenizer([])
    found = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(found) == plain(FALLBACK, ids)
    assert max(decoded) < 20
    assert len(decoded) < 20
    spelled = FALLBACK.detokenizer([], spelled=[end])
    assert "".join(spelled.add(token_id) for token_id in ids).count(EOS) == 500


def test_a_broken_run_does_not_take_the_next_words_space() -> None:
    word = FALLBACK.encode("a b", add_special_tokens=False)[-1]
    broken = [FALLBACK.token_to_id("<0xFF>") or 0] * 16
    found = "".join(pieces(FALLBACK, [word, *broken, word, word]))
    assert found.replace(REPLACEMENT, "") == FALLBACK.decode([word, word, word])


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.sampled_from(["a", " b", "é", "🙂", EOS]), max_size=12))
def test_special_tokens_are_spelled_out_where_that_is_asked_for(texts: list[str]) -> None:
    for tokenizer in (BYTES, FALLBACK):
        ids = tokenizer.encode("".join(texts), add_special_tokens=False)
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=False)
        found = [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]
        assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=False)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.sampled_from(["a", " b", "é", "🙂", EOS, "<|call|>", "</s>"]), max_size=12))
def test_some_special_tokens_are_spelled_out(texts: list[str]) -> None:
    for fast in (byte_level(), byte_fallback()):
        fast.add_special_tokens([AddedToken("<|call|>"), AddedToken("</s>")])
        tokenizer = Tokenizer(fast)
        ids = tokenizer.encode("".join(texts), add_special_tokens=False)
        spelled = {tokenizer.token_to_id("<|call|>")}
        kept = [one for one in ids if one in spelled or not tokenizer.is_special(one)]
        detokenizer = tokenizer.detokenizer([], spelled=spelled)
        found = [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]
        assert "".join(found) == tokenizer.decode(kept, skip_special_tokens=False)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(lambda s: EOS not in s)
)
def test_pieces_of_any_text_join_to_it_and_are_never_broken(text: str) -> None:
    ids = BYTES.encode(text)
    for found in (pieces(BYTES, ids), windowed(ids)):
        assert "".join(found) == text
        assert REPLACEMENT in text or REPLACEMENT not in "".join(found)


@settings(max_examples=examples(200), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_split_at_every_byte(text: str) -> None:
    ids = [BYTES.token_to_id(char) for char in _byte_tokens(text)]
    found = pieces(BYTES, [token_id for token_id in ids if token_id is not None])
    assert "".join(found) == text
    assert all(text.startswith("".join(found[:end])) for end in range(len(found)))


def _byte_tokens(text: str) -> list[str]:
    alphabet = {byte: char for char, byte in BYTES._alphabet.items()}
    return [alphabet[byte] for byte in text.encode()]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=30))
def test_any_tokens_give_the_text_of_the_whole(ids: list[int]) -> None:
    """Whatever the tokens: broken characters, special and added tokens."""
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


def test_bytes_of_single_tokens() -> None:
    for text in ("é日😀", "the sea"):
        ids = BYTES.encode(text, add_special_tokens=False)
        assert b"".join(map(BYTES.token_bytes, ids)).decode() == text
    assert BYTES.token_bytes(0) == EOS.encode()
    assert BYTES.token_bytes(100_000) == b""
    name = FALLBACK.token_to_id("<0xE9>")
    assert name is not None
    assert FALLBACK.token_bytes(name) == b"\xe9"


def test_tokens_without_bytes() -> None:
    assert BYTES.decode([0]) == ""
    assert BYTES.token_text(0) == EOS
    assert pieces(BYTES, [0, 100_000]) == ["", "", ""]
    ids = BYTES.encode(f"a{TOOL}b{EOS}c")
    assert "".join(pieces(BYTES, ids)) == f"a{TOOL}bc"


@settings(max_examples=examples(100), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=" "), max_size=12))
def test_byte_fallback_joins_to_the_text(text: str) -> None:
    assert "".join(pieces(FALLBACK, fallback_ids(text))) == text


@pytest.mark.parametrize("special", [False, True])
def test_added_letters_are_no_bytes(special: bool) -> None:
    """DeepSeek Coder has ý and others as added tokens, which are names of bytes, too."""
    fast = byte_level()
    fast.add_tokens([AddedToken("\u00fd", special=special)])
    own = Tokenizer(fast)
    ids = own.encode("a\u00fd \u00fc")
    assert own.token_to_id("\u00fd") in ids
    text = "a\u00fd \u00fc" if not special else "a \u00fc"
    assert own.decode(ids) == text
    assert own.decode(ids, skip_special_tokens=False) == "a\u00fd \u00fc"
    pieces = own.detokenizer([])
    assert "".join([*map(pieces.add, ids), pieces.finish()]) == text
    assert own.token_bytes(ids[1]) == "\u00fd".encode()


def test_spaces_between_words_and_after_a_prompt() -> None:
    ids = [FALLBACK.token_to_id(word) for word in ("▁the", "▁sea", "▁is", "▁de", "e", "p")]
    known = [token_id for token_id in ids if token_id is not None]
    assert pieces(FALLBACK, known) == ["the", " sea", " is", " de", "e", "p", ""]
    assert pieces(FALLBACK, known[2:], prompt=known[:2]) == [" is", " de", "e", "p", ""]


def test_an_incomplete_character_is_held_and_replaced_only_at_the_end() -> None:
    ids = fallback_ids("é🙂")
    assert pieces(FALLBACK, ids) == ["", "é", "", "", "", "🙂", ""]
    assert pieces(FALLBACK, ids[:-1]) == ["", "é", "", "", "", REPLACEMENT * 3]
    assert "".join(pieces(BYTES, BYTES.encode("🙂")[:1])) == REPLACEMENT


def test_endless_broken_bytes_are_released_and_what_follows_is_right() -> None:
    broken = FALLBACK.token_to_id("<0xFF>")
    assert broken is not None
    found = pieces(FALLBACK, [broken] * 40 + fallback_ids("é"))
    assert "".join(found[:40]) == REPLACEMENT * 32  # 16 at a time
    assert "".join(found).count(REPLACEMENT) >= 40


class Letters:
    """Token n is the n-th piece."""

    def __init__(self, split: Sequence[str]) -> None:
        self._split = split

    def add(self, token_id: int) -> str:
        return self._split[token_id]

    def finish(self) -> str:
        return ""


def stream(
    split: Sequence[str], stop: tuple[str, ...], **options: Any
) -> tuple[list[str], str | None]:
    """All pieces that are released, and the stop string that ended it."""
    texts = TextStream(Letters(split), stop, **options)
    released = []
    for index in range(len(split)):
        piece, found = texts.add(index)
        released.append(piece)
        if found is not None:
            return released, found
    rest, found = texts.finish()
    return [*released, rest], found


@pytest.mark.parametrize(
    ("split", "stop", "released", "found"),
    [
        (["ab", "cd"], (), ["ab", "cd", ""], None),
        (["ab", "cd"], ("x",), ["ab", "cd", ""], None),
        (["a STOP b"], ("STOP",), ["a "], "STOP"),
        (["a ST", "OP b"], ("STOP",), ["a ", ""], "STOP"),
        (["a ST", "AY b"], ("STOP",), ["a ", "STAY b", ""], None),
        (["a ST"], ("STOP",), ["a ", "ST"], None),
        (["a", "a", "b"], ("aab",), ["", "", ""], "aab"),
        (["a", "a", "a", "b"], ("aab",), ["", "", "a", ""], "aab"),
        (["xyz"], ("z", "y"), ["x"], "y"),  # complete first
        (["xabc"], ("bc", "abc"), ["x"], "abc"),  # complete together: the longest
        (["ab"], ("ab", "a"), [""], "a"),
        (["\n", "\nHuman:"], ("\n\nHuman:", "\n\n"), ["", ""], "\n\n"),
    ],
)
def test_stop_strings(
    split: list[str], stop: tuple[str, ...], released: list[str], found: str | None
) -> None:
    assert stream(split, stop) == (released, found)


@settings(max_examples=examples(300), deadline=None)
@given(
    text=st.text("abc", max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    data=st.data(),
)
def test_how_text_is_split_makes_no_difference(
    text: str, stop: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    split = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    by_letter, found = stream(list(text), tuple(stop))
    released, found_again = stream(split, tuple(stop))
    assert ("".join(released), found_again) == ("".join(by_letter), found)
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
    if ends:
        assert (found, "".join(by_letter)) == (min(ends)[2], text[: min(ends)[1]])
    else:
        assert (found, "".join(by_letter)) == (None, text)


@settings(max_examples=examples(300), deadline=None)
@given(
    split=st.lists(st.text("abc", max_size=3), max_size=6),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 6),
    includes_stop=st.booleans(),
)
def test_stop_strings_that_are_complete_too_early_are_text(
    split: list[str], stop: list[str], min_tokens: int, includes_stop: bool
) -> None:
    released, found = stream(split, tuple(stop), min_tokens=min_tokens, includes_stop=includes_stop)
    text, early = "".join(split), len("".join(split[:min_tokens]))
    ends = [
        (start + len(s), start, s)
        for s in stop
        for start in range(len(text))
        if text.startswith(s, start) and start + len(s) > early
    ]
    if not ends:
        assert ("".join(released), found) == (text, None)
        return
    end, start, string = min(ends)
    assert ("".join(released), found) == (text[: end if includes_stop else start], string)


def test_find_stop_and_longest_beginning() -> None:
    assert find_stop("abc", ("d",)) is None
    assert find_stop("abcd", ("cd", "b")) == (1, "b")
    assert find_stop("abab", ("ab", "b"), after=1) == (0, "ab")
    assert find_stop("abab", ("ab", "b"), after=2) == (2, "ab")
    assert find_stop("abab", ("ab",), after=4) is None
    assert longest_beginning("xab", ("abc", "bcd")) == 2
    assert longest_beginning("xab", ()) == 0


def test_a_tokenizer_is_read_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path, frozenset())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ArtifactError, match="not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path, frozenset())
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path, frozenset({0}))
    assert tokenizer.eos_token_ids == {0}
    assert tokenizer.decode(tokenizer.encode("the sea")) == "the sea"
    assert tokenizer.token_to_id(EOS) == 0
    assert tokenizer.token_to_id("no such token") is None


def test_texts_that_no_context_holds_are_refused_before_they_are_encoded() -> None:
    tokenizer = Tokenizer(byte_level())
    longest = max(map(len, tokenizer.vocabulary()))
    tokenizer.check_length("x" * (10 * longest), 10)
    with pytest.raises(CapacityError, match=f"has {10 * longest + 1} characters, and 10 tokens"):
        tokenizer.check_length("x" * (10 * longest + 1), 10)


@pytest.mark.parametrize("what", ["normalizer", "token", "unknown"])
def test_texts_of_which_a_token_may_stand_for_any_length_are_not(what: str) -> None:
    fast = byte_level()
    if what == "normalizer":
        fast.normalizer = normalizers.Strip()
    elif what == "unknown":
        fast = FastTokenizer(models.WordLevel({"<|x|>": 0, "[UNK]": 1}, unk_token="[UNK]"))
    else:
        fast.add_special_tokens([AddedToken("<|x|>", rstrip=True)])
    tokenizer = Tokenizer(fast)
    text = "<|x|>" + " " * 9999
    tokenizer.check_length(text, 10)
    assert len(tokenizer.encode(text)) < 10


def test_several_texts_at_once() -> None:
    tokenizer = Tokenizer(byte_level())
    texts = ["the sea", "", "naïve — 🙂", "the sea"]
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_all([]) == []


def ended(stream: TextStream, token_ids: Sequence[int]) -> list[tuple[str, str | None]]:
    """What a stream gives for the last tokens, up to a stop string."""
    found = []
    for token_id in token_ids:
        found.append(stream.add(token_id))
        if found[-1][1] is not None:
            return found
    return [*found, stream.finish()]


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["bytes", "window"])
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_forks_go_on_on_their_own(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Each gives the text that it would give if it had read all by itself."""
    texts = st.lists(st.sampled_from(["ab", "é", "猫", "🙂", " the", "stop"]), max_size=6)
    ids = tokenizer.encode("".join(data.draw(texts)))
    ends = [tokenizer.encode("".join(data.draw(texts))) for _ in range(2)]
    begin = ids[: data.draw(st.integers(0, len(ids)))]

    def begun() -> TextStream:
        made = TextStream(tokenizer.detokenizer([]), ("stop", "b é"), min_tokens=2)
        for token_id in begin:
            made.add(token_id)
        return made

    first = begun()
    forks = [first.fork(), first.fork()]
    for fork, end in zip(forks, ends, strict=True):
        assert ended(fork, end) == ended(begun(), end)
