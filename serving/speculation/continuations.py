"""What most likely goes on a text, by what went on others that ended like it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Draft(NamedTuple):
    """Tokens that may follow."""

    tokens: Sequence[int]
    expected: float  # how many of them are expected to be right, by frequency


NOTHING = Draft((), 0.0)


def longest_drafts(depth: int, factor: float) -> tuple[int, ...]:
    """Return by the length of a match, from 0 to `depth`, how many tokens are guessed at most.

    As in vLLM these are `factor` times the match, which together with them has no more than
    `depth` tokens. A longer match counts as the part of it that allows the most.
    """
    longest = [0]
    for match in range(1, depth + 1):
        allowed = min(int(factor * match + 1e-6), depth - match)
        longest.append(max(longest[-1], allowed))
    return tuple(longest)


def likeliest(rows: Iterable[bytes], length: int, least: float) -> Draft:
    """Return the tokens that went on most often, place by place.

    A token's probability is its share of the rows that went on like those before it in the draft,
    times theirs. A row that ended says nothing about what would have come.

    Args:
        rows: what went on, int32 [length or more], the latest first, which decides between equals;
            behind the end of one is a negative number.
        length: most tokens.
        least: the least probability of a token, with all those before it.
    """
    counts = Counter(rows)
    going = [(array("i", row), count) for row, count in counts.items()]
    draft: list[int] = []
    probability, expected = 1.0, 0.0
    for place in range(length):
        if len(going) == 1:
            rest = _going(going[0][0][place:length])
            draft += rest
            expected += probability * len(rest)
            break
        votes: dict[int, int] = {}
        for row, count in going:
            token_id = row[place]
            if token_id >= 0:
                votes[token_id] = votes.get(token_id, 0) + count
        if not votes:
            break
        token_id = max(votes, key=votes.__getitem__)
        probability *= votes[token_id] / sum(votes.values())
        if probability < least:
            break
        draft.append(token_id)
        expected += probability
        going = [one for one in going if one[0][place] == token_id]
    return Draft(draft, expected)


def _going(row: array[int]) -> list[int]:
    """Return the tokens of a row up to its end."""
    tokens = row.tolist()
    for place, token_id in enumerate(tokens):
        if token_id < 0:
            return tokens[:place]
    return tokens
