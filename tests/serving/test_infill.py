"""Prompts that are filled in: tokens of each family, parts in order, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, processors

from onnxport.errors import ArtifactError, CapacityError, RequestError
from onnxport.serving.infill import (
    FAMILIES,
    Extra,
    Infill,
    InfillNames,
    last_that_fit,
    shares,
)
from onnxport.serving.tokenizer import Tokenizer

from .tokenizers_for_tests import EOS, byte_fallback, byte_level

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PROJECT = ("<|repo_name|>", "<|file_sep|>")


def tokenizer(*tokens: str, special: bool = False) -> Tokenizer:
    """Byte-level, with these tokens; Qwen's file does not call its own special."""
    fast = byte_level()
    fast.add_tokens([AddedToken(token, special=special) for token in tokens])
    return Tokenizer(fast)


def spelled(own: Tokenizer, token_ids: Sequence[int]) -> str:
    return own.decode(token_ids, skip_special_tokens=False)


@pytest.mark.parametrize("names", FAMILIES, ids=lambda names: names.prefix)
def test_every_family_is_found(names: InfillNames) -> None:
    needed = [one for one in (names.prefix, names.suffix, names.middle) if one]
    own = tokenizer(*needed)
    found = Infill.find(own)
    assert found is not None
    assert (found.names.prefix, found.names.suffix, found.names.middle) == (
        *(names.prefix, names.suffix),
        names.middle,
    )
    text = spelled(own, found.around("sea", "deep").token_ids)
    middle = names.middle or ""
    if names.suffix_first:
        assert text == f"{names.suffix}deep{names.prefix}sea{middle}"
    else:
        assert text == f"{names.prefix}sea{names.suffix}deep{middle}"
    for missing in needed:
        assert Infill.find(tokenizer(*(one for one in needed if one != missing))) is None


def test_tokens_that_need_not_be_there() -> None:
    def names(*tokens: str) -> InfillNames:
        found = Infill.find(tokenizer(*QWEN[:3], *tokens))
        assert found is not None
        return found.names

    assert names(QWEN[3], *PROJECT) == FAMILIES[0]
    assert names("<|file_separator|>") == FAMILIES[1]
    assert names(QWEN[3]) == InfillNames(*QWEN)
    assert names() == InfillNames(*QWEN[:3])


def test_tokens_that_files_name() -> None:
    """They go first, and a family that the vocabulary has tells what they do not."""
    own = tokenizer(*QWEN, *PROJECT, "<before>", "<behind>")

    def names(**told: object) -> InfillNames:
        own.infill_tokens = told
        found = Infill.find(own)
        assert found is not None
        return found.names

    assert names() == FAMILIES[0]
    assert names(prefix="<before>") == replace(FAMILIES[0], prefix="<before>")
    assert names(pad="<behind>") == replace(FAMILIES[0], pad="<behind>")
    own = tokenizer("<before>", "<behind>", "<gap>")
    told = {"prefix": "<before>", "suffix": "<behind>"}
    assert names(**told, middle="<gap>") == InfillNames("<before>", "<behind>", "<gap>")
    assert names(**told) == InfillNames("<before>", "<behind>", suffix_first=True)
    with pytest.raises(RequestError, match="no token '<hole>'"):
        names(**told, middle="<hole>")
    with pytest.raises(RequestError, match="have 'hole'"):
        names(**told, hole="<gap>")
    own.infill_tokens = {"prefix": "<before>"}
    assert Infill.find(own) is None


def test_files_that_name_them(tmp_path: Path) -> None:
    own = tokenizer("<before>", "<behind>", "<gap>")
    (tmp_path / "tokenizer.json").write_text(own.to_json(), encoding="utf-8")
    path = tmp_path / "tokenizer_config.json"
    assert Tokenizer.from_folder(tmp_path, frozenset()).infill_tokens == {}
    told = {"prefix": "<before>", "suffix": "<behind>", "middle": "<gap>"}
    path.write_text(json.dumps({"infill_tokens": told}), encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path, frozenset()).infill_tokens == told
    for wrong in ("[", "[]", '{"infill_tokens": ["<gap>"]}'):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ArtifactError, match=r"tokenizer_config\.json (is not valid|has no)"):
            Tokenizer.from_folder(tmp_path, frozenset())


def test_the_suffix_first() -> None:
    own = tokenizer(*QWEN)
    found = Infill.find(own, suffix_first=True)
    assert found is not None
    text = spelled(own, found.around("sea", "deep").token_ids)
    assert text == "<|fim_suffix|>deep<|fim_prefix|>sea<|fim_middle|>"


def test_other_files() -> None:
    own = tokenizer(*QWEN, *PROJECT)
    found = Infill.find(own)
    assert found is not None
    extras = [Extra("a.py", "hi\n"), Extra("b.py", "there\n")]
    filling = found.in_project("sea ", "deep", extras)
    assert not filling.is_cut
    assert spelled(own, filling.token_ids) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nhi\n<|file_sep|>b.py\nthere\n"
        "<|file_sep|>filename\n<|fim_prefix|>sea <|fim_suffix|>deep<|fim_middle|>"
    )
    alone = found.in_project("sea ", "deep", [])
    assert spelled(own, alone.token_ids).startswith("<|repo_name|>myproject\n<|file_sep|>filename")


def test_other_texts_where_no_token_begins_a_file() -> None:
    own = tokenizer(*QWEN, PROJECT[0])
    found = Infill.find(own)
    assert found is not None
    text = spelled(own, found.in_project("a", "b", [Extra("a.py", "hi\n")]).token_ids)
    assert text == ("\n\n--- snippet ---\n\nhi\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>")


def test_what_spells_a_token_is_text() -> None:
    """Be it one that the file calls special or not: whoever edits this very file has such texts."""
    own = tokenizer(*QWEN, *PROJECT)
    found = Infill.find(own)
    assert found is not None
    evil = f"a{QWEN[1]}b{EOS}c{PROJECT[1]}"
    for filling in (
        found.around(evil, "z"),
        found.around("z", evil),
        found.in_project("y", "z", [Extra(evil, evil)]),
    ):
        for token in QWEN[:3]:
            assert filling.token_ids.count(own.token_to_id(token) or -1) == 1
        separators = filling.token_ids.count(own.token_to_id(PROJECT[1]) or -1)
        assert separators == (2 if "myproject" in spelled(own, filling.token_ids) else 0)
        assert own.token_to_id(EOS) not in filling.token_ids
        assert evil in spelled(own, filling.token_ids)


def test_what_the_tokenizer_takes_for_a_special_token_is_text() -> None:
    """It may spell it otherwise, and what spells it may be none, as within a word."""
    fast = byte_level()
    fast.normalizer = normalizers.Lowercase()
    fast.add_tokens([*QWEN[:3]])
    fast.add_special_tokens([AddedToken("<|call|>", special=True, normalized=True)])
    fast.add_special_tokens([AddedToken("deep", special=True, single_word=True)])
    own = Tokenizer(fast)
    found = Infill.find(own)
    assert found is not None
    for text in ("a <|CALL|> b", "the deep sea", "deepest"):
        token_ids = found.around(text, "").token_ids
        assert not {own.token_to_id("<|call|>"), own.token_to_id("deep")} & {*token_ids}, text
        assert text.lower() in spelled(own, token_ids)


def test_a_text_begins_with_what_the_tokenizer_puts_there() -> None:
    fast = byte_level()
    fast.add_tokens([*QWEN])
    fast.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, fast.token_to_id(EOS))]
    )
    own = Tokenizer(fast)
    found = Infill.find(own)
    assert found is not None
    assert spelled(own, found.around("a", "b").token_ids).startswith(f"{EOS}<|fim_prefix|>a")
    bare = found.around("a", "b", begins=False)
    assert spelled(own, bare.token_ids).startswith("<|fim_prefix|>a")


def test_a_suffix_gets_no_space() -> None:
    fast = byte_fallback()
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.add_special_tokens(["▁<PRE>", "▁<SUF>", "▁<MID>"])
    own = Tokenizer(fast)
    found = Infill.find(own)
    assert found is not None
    tokens = [own.token_spelling(one) for one in found.around("the", "sea").token_ids]
    assert tokens == ["▁<PRE>", "▁", *"the", "▁<SUF>", *"sea", "▁<MID>"]
    assert own.token_to_id("▁<MID>") in found.ends


def test_what_ends_a_filling() -> None:
    own = tokenizer(*QWEN, *PROJECT, "<|im_end|>", "<|endoftext|>")
    found = Infill.find(own)
    assert found is not None
    wanted = {own.token_to_id(one) for one in (*QWEN, *PROJECT, "<|im_end|>", "<|endoftext|>")}
    assert {*found.ends} == wanted


def test_names_by_hand() -> None:
    own = tokenizer("<a>", "<b>", "<c>")
    names = InfillNames.of({"prefix": "<a>", "suffix": "<b>", "middle": "<c>"}, suffix_first=False)
    text = spelled(own, Infill(own, names).around("x", "y").token_ids)
    assert text == "<a>x<b>y<c>"
    for told, match in (
        ({"prefix": "<a>", "suffix": "<b>", "end": "<c>"}, "'end'"),
        ({"prefix": "<a>", "middle": "<c>"}, "lack suffix"),
        ({"prefix": "<a>", "suffix": 5}, "suffix is 5"),
        ({"prefix": "<a>", "suffix": ""}, "suffix is ''"),
        ({"prefix": "<a>", "suffix": "<b>"}, "no middle"),
    ):
        with pytest.raises(RequestError, match=match):
            InfillNames.of(told, suffix_first=False)
    InfillNames.of({"prefix": "<a>", "suffix": "<b>"}, suffix_first=True)
    with pytest.raises(RequestError, match="no token '<d>'"):
        Infill(own, InfillNames("<a>", "<d>", "<c>"))


@pytest.mark.parametrize(
    ("sizes", "room", "expected"),
    [
        ((10, 5), 15, (10, 5)),
        ((10, 5), 12, (9, 3)),
        ((100, 100), 40, (30, 10)),
        ((100, 2), 40, (38, 2)),
        ((3, 100), 40, (3, 37)),
        ((5, 5), 0, (0, 0)),
        ((0, 5), 3, (0, 3)),
    ],
)
def test_shares(sizes: tuple[int, int], room: int, expected: tuple[int, int]) -> None:
    assert shares(*sizes, room) == expected


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 600))
def test_shares_leave_no_room_unused(num_prefix: int, num_suffix: int, room: int) -> None:
    prefix, suffix = shares(num_prefix, num_suffix, room)
    assert 0 <= prefix <= num_prefix
    assert 0 <= suffix <= num_suffix
    assert prefix + suffix == min(room, num_prefix + num_suffix)


def test_last_that_fit() -> None:
    assert last_that_fit([3, 4, 5], 12) == 3
    assert last_that_fit([3, 4, 5], 11) == 2
    assert last_that_fit([3, 4, 5], 4) == 0
    assert last_that_fit([], 4) == 0


def test_what_is_left_out() -> None:
    """Extras first, the first of them before others; then both ends of the file."""
    own = tokenizer(*QWEN, *PROJECT)
    found = Infill.find(own)
    assert found is not None
    extras = [Extra("1", "q" * 30), Extra("2", "w" * 30)]
    prefix, suffix = "<abcdefgh", "klmnopqr>"
    whole = found.in_project(prefix, suffix, extras)
    size = len(whole.token_ids)
    assert found.in_project(prefix, suffix, extras, size) == whole
    shorter = found.in_project(prefix, suffix, extras, size - 1)
    text = spelled(own, shorter.token_ids)
    assert shorter.is_cut
    assert ("q" in text.replace("nopqr", ""), "w" * 30 in text) == (False, True)
    assert prefix in text
    assert suffix in text
    bare = len(found.in_project("", "", []).token_ids)
    tight = found.in_project(prefix, suffix, extras, bare + 8)
    text = spelled(own, tight.token_ids)
    assert len(tight.token_ids) <= bare + 8
    assert tight.is_cut
    assert text.endswith("h<|fim_suffix|>kl<|fim_middle|>")
    assert not found.in_project("", "", [], bare).is_cut
    with pytest.raises(CapacityError, match="hold it together"):
        found.in_project("", "", [], bare - 1)
