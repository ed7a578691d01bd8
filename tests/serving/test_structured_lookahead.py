"""Patterns that look ahead, written as several that do not: what fits these fits the one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.serving.structured.lookahead import MOST_AHEAD, without_lookahead

PATTERNS = (
    r"^(?=.*[A-C])(?=.*\d).{3,}$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!\.)(?!.*\.\.)[a.A]*$",
    r"^(?!a).*",
    r"^(?![^a])a?",
    r"^(?!\s*$).+",
    r"^(?!.*[ab]).{2}",
    r"^(?!.*\d)",
    r"^(?=a|b)(?=.b).",
    r"^(?!\d)[a1.]",
    r"^(?=(a|b)*$)a",
    r"^(?!.*--)[-a]+$",
    r"^(?=[|(\])])[|a(\])]+$",
)


@given(st.sampled_from(PATTERNS), st.text("aAb01.-+ \n|()]", max_size=6))
def test_they_say_the_same(pattern: str, text: str) -> None:
    parts = without_lookahead(pattern)
    assert parts is not None
    if text.endswith("\n"):  # where Python's $ is, and no other's
        return
    fits = all(re.search(part, text) for part in parts)
    if "\n" in text:  # what a text must not have then counts for all its lines
        assert not fits or re.search(pattern, text)
    else:
        assert fits == bool(re.search(pattern, text))
    assert not any("(?=" in part or "(?!" in part for part in parts)


@pytest.mark.parametrize(
    "pattern",
    [
        r"a(?=b)",
        r"^a(?=b)",
        r"(?=a)b",
        r"^(?=a)b|c",
        r"^(?=a)?b",
        r"^(?=a){0}b",
        r"^(?=a(?!b))c",
        r"^(?!ab)c",
        r"^(?!.*ab)c",
        r"^(?!(a))c",
        r"^(?!a|b)c",
        r"^(?<=a)c",
        r"^(?=a)c(?!d)",
        r"^(?=[]a])c",
        r"^(?=[^]a])c",
        r"^(?=a",
        r"^(?!.*a\.)c",
        "^" + "(?=a)" * (MOST_AHEAD + 1),
    ],
)
def test_others_are_not_touched(pattern: str) -> None:
    assert without_lookahead(pattern) is None
