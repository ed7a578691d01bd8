"""What a piece of generated text was split into."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Split:
    """What one piece of text gave. Reasoning comes before content."""

    reasoning: str = ""
    content: str = ""


class Stretch(NamedTuple):
    """Characters of the answer that stand behind each other in the text, too.

    Attributes:
        start: the first one in the answer.
        place: the same in the text.
        length: how many they are; None: all that follow.
    """

    start: int
    place: int
    length: int | None


def joined(last: Stretch, following: Stretch) -> Stretch | None:
    """Return two stretches as one; None: other characters are between them.

    Args:
        last: the end of it is known.
        following: stands behind it.
    """
    assert last.length is not None
    if following[:2] != (last.start + last.length, last.place + last.length):
        return None
    length = None if following.length is None else last.length + following.length
    return last._replace(length=length)


def places(stretches: Sequence[Stretch], start: int, end: int) -> list[tuple[int, int]]:
    """Where in the text some characters of the answer are, as ranges, in order."""
    found = []
    begin = bisect_right(stretches, start, key=lambda each: each.start) - 1
    for each in islice(stretches, max(0, begin), None):
        if each.start >= end:
            break
        first = max(start, each.start)
        last = end if each.length is None else min(end, each.start + each.length)
        if first < last:
            shift = each.place - each.start
            found.append((first + shift, last + shift))
    return found
