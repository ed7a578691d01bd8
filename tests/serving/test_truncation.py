"""What stays of a prompt that is cut."""

from __future__ import annotations

from typing import Any

import pytest

from onnxport.errors import CapacityError, RequestError
from onnxport.serving.truncation import Around, check_truncation, cut


@pytest.mark.parametrize(
    ("prompt", "bare", "ahead", "behind"),
    [
        ([1, 5, 6, 7, 2], [1, 5, 2], 2, 1),  # a beginning, a prompt, and an end
        ([5, 6, 7], [5], 1, 0),
        ([5, 9, 7], [5, 6], 1, 0),  # a prompt whose end is one token with the text's beginning
        ([5, 6], [5, 6], 2, 0),  # no text
        ([5, 6, 5, 6], [5, 6], 2, 0),  # a text like the prompt
        ([5, 6, 7], [], 0, 0),
    ],
)
def test_what_is_around_a_text(prompt: list[int], bare: list[int], ahead: int, behind: int) -> None:
    around = Around.of(prompt, bare)
    assert around == Around(ahead, behind)


@pytest.mark.parametrize(("side", "left"), [(None, [7, 8]), ("left", [7, 8]), ("right", [6, 7])])
def test_what_is_around_a_text_stays(side: Any, left: list[int]) -> None:
    prompt = [1, 5, 6, 7, 8, 2]
    assert cut(prompt, 5, Around(2, 1), side) == [1, 5, *left, 2]
    assert cut(prompt, 6, Around(2, 1), side) == prompt
    with pytest.raises(CapacityError, match="are 3 tokens, and a prompt is to have 3 at most"):
        cut(prompt, 3, Around(2, 1), side)


def test_without_anything_around_an_end_is_left() -> None:
    assert cut([1, 2, 3], 2, Around()) == [2, 3]
    assert cut([1, 2, 3], 2, Around(), "right") == [1, 2]


@pytest.mark.parametrize("value", [0, -2, True, "3", 1.5])
def test_what_is_no_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match=r"truncate_prompt_tokens is .*; use 1 or more, or -1"):
        check_truncation(value)
    for good in (None, -1, 1):
        check_truncation(good)
