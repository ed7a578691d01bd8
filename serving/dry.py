"""DRY: what would go on with a repetition is made less likely, the more the longer it is.

Where the end of a sequence has stood before, the token that followed there is expected to follow
again. Its logit is lowered by multiplier * base ** (length - allowed_length), for the longest such
end, if that has `allowed_length` tokens or more (p-e-w's DRY, "Don't Repeat Yourself", in
text-generation-webui's pull request 5677, 2024, and llama.cpp's sampler of that name). Breakers,
such as ends of lines, are never lowered, and no repetition is followed across them. Nor are special
tokens, which end every turn of a chat.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.serving.edits import NO_IDS, NO_VALUES, Floats, Ids
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

LONGEST = 256  # tokens of a repetition that count
LENGTH_BITS = 9  # of a number up to that
MOST_LOWERED = 1e5  # of a logit; more would not be told apart
ROOM = 64  # tokens
SPARSE = 16  # of so many tokens one, so that looking at these costs less than looking at all

Read = tuple[Ids, NDArray[np.bool_], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Dry:
    """What the parameters of a request say of repetitions; see `SamplingParams`."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int  # tokens that are looked at, the last ones; -1: all
    breakers: tuple[bytes, ...] = ()  # a token that has one of them in it is one
    tokenizer: Tokenizer | None = None  # None: no token is one
    # Of the request's prompt, once a sequence has read it: tokens, breakers and lengths.
    prompt: list[Read] = field(default_factory=list, init=False, compare=False, repr=False)
    _known: dict[int, bool] = field(default_factory=dict, init=False, compare=False, repr=False)

    def breaks(self, token_ids: Iterable[int]) -> list[bool]:
        """Return for each token whether it is a breaker; asked by the engine's thread alone."""
        if self.tokenizer is None:
            return [False for _ in token_ids]
        found = []
        for token_id in token_ids:
            known = self._known.get(token_id)
            if known is None:
                text = self.tokenizer.token_bytes(token_id)
                known = any(one in text for one in self.breakers)
                known = self._known[token_id] = known or self.tokenizer.is_special(token_id)
            found.append(known)
        return found

    def lowered(self, lengths: NDArray[np.int32]) -> NDArray[np.float64]:
        """Return by how much logits are lowered that go on with repetitions of these lengths."""
        with np.errstate(over="ignore"):
            powers = np.power(self.base, lengths - float(self.allowed_length))
        found: NDArray[np.float64] = np.minimum(self.multiplier * powers, MOST_LOWERED)
        return found


class Repetitions:
    """Which tokens would go on with a repetition in one sequence, and how long that is.

    `_lengths[i]` says how many tokens up to and with token `i` are the last ones of the sequence,
    too: with each token these are one more, or none.
    """

    __slots__ = ("_ahead", "_breaks", "_dry", "_ids", "_lengths", "_num_prompt", "_size")

    def __init__(self, dry: Dry, num_prompt_tokens: int) -> None:
        """Begin with a sequence of which so many tokens are its prompt, which is not read yet."""
        self._dry = dry
        self._num_prompt = num_prompt_tokens
        self._size = 0
        self._ids: Ids = NO_IDS
        self._breaks = np.empty(0, np.bool_)
        self._lengths = np.empty(0, np.int32)
        self._ahead: tuple[tuple[int, ...], Repetitions] | None = None  # with guesses of this step

    def penalties(self, tokens: array[int], assumed: Sequence[int] = ()) -> tuple[Ids, Floats]:
        """Return the tokens that are made less likely, each once, and what is added to them.

        Args:
            tokens: the prompt and the output so far; those of the call before, and more.
            assumed: tokens that are taken to follow, for this call alone.
        """
        if not self._size:
            self._read_prompt(tokens[: self._num_prompt])
        for token_id in tokens[self._size :]:
            self._ahead = None
            self._read(token_id)
        return self._with(tuple(assumed))._found() if assumed else self._found()

    def fork(self) -> Repetitions:
        """Return one that has read the same tokens, and goes on on its own."""
        other = Repetitions(self._dry, self._num_prompt)
        other._size = self._size
        other._ids, other._breaks, other._lengths = (
            np.concatenate((one[: self._size], np.zeros(ROOM, one.dtype)))
            for one in (self._ids, self._breaks, self._lengths)
        )
        return other

    def _with(self, assumed: tuple[int, ...]) -> Repetitions:
        """Return what would be with more tokens; best asked for one more each time."""
        read, further = self._ahead or ((), None)
        if further is None or assumed[: len(read)] != read:
            read, further = (), self.fork()
        for token_id in assumed[len(read) :]:
            further._read(token_id)
        self._ahead = (assumed, further)
        return further

    def _read_prompt(self, prompt: array[int]) -> None:
        """Read the prompt at once; all sequences of a request have the same, and read it once."""
        if not self._dry.prompt:
            ids = np.array(prompt, np.int64)
            breaks = np.array(self._dry.breaks(prompt), np.bool_)
            self._dry.prompt.append((ids, breaks, _lengths(ids, breaks)))
        # They are copied when a token comes behind them, and not changed.
        [(self._ids, self._breaks, self._lengths)] = self._dry.prompt
        self._size = len(prompt)

    def _read(self, token_id: int) -> None:
        """Read one token more."""
        size = self._size
        if size == len(self._ids):  # twice the room, so that growing costs little
            more = max(ROOM, size)
            self._ids = np.concatenate((self._ids, np.zeros(more, np.int64)))
            self._breaks = np.concatenate((self._breaks, np.zeros(more, np.bool_)))
            self._lengths = np.concatenate((self._lengths, np.zeros(more, np.int32)))
        self._ids[size] = token_id
        self._size = size = size + 1
        [is_breaker] = self._dry.breaks((token_id,))
        self._breaks[size - 1] = is_breaker
        lengths = self._lengths[:size]
        if is_breaker:
            lengths[:] = 0
            return
        lengths[1:] = np.minimum(lengths[:-1] + 1, LONGEST)
        lengths[0] = 1
        lengths *= self._ids[:size] == token_id

    def _found(self) -> tuple[Ids, Floats]:
        """Return what is made less likely by what was read."""
        dry, size = self._dry, self._size
        first = 0 if dry.last_n < 0 else max(0, size - dry.last_n)
        least = max(1, dry.allowed_length)
        places = first + np.flatnonzero(self._lengths[first : size - 1] >= least)
        places = places[~self._breaks[places + 1]]
        lengths = np.minimum(self._lengths[places], (places - first + 1).astype(np.int32))
        enough = lengths >= least
        places, lengths = places[enough], lengths[enough]
        if not len(places):
            return NO_IDS, NO_VALUES
        # Each token once, with the longest of its repetitions, which comes last in this order.
        keys = np.sort(self._ids[places + 1] << LENGTH_BITS | lengths)
        token_ids = keys >> LENGTH_BITS
        last = np.append(token_ids[1:] != token_ids[:-1], True)
        longest = (keys[last] & ((1 << LENGTH_BITS) - 1)).astype(np.int32)
        return token_ids[last], (-dry.lowered(longest)).astype(np.float32)


def _lengths(ids: Ids, breaks: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return how many tokens up to and with each are the last ones, too, int32 [num_tokens].

    From the last one back, as long as any are the same: while there are many all are looked at,
    then those alone.

    Args:
        ids: int64 [num_tokens].
        breaks: which of them are breakers.
    """
    size = len(ids)
    found = np.zeros(size, np.int32)
    narrow = ids.astype(np.int32)
    same = np.ones(size, np.bool_)  # whether all so far are
    places: NDArray[np.int64] | None = None
    for length in range(1, min(size, LONGEST) + 1):
        if breaks[size - length]:
            break
        wanted = narrow[size - length]
        if places is None:
            same[: length - 1] = False
            same[length - 1 :] &= narrow[: size - length + 1] == wanted
            found += same
            if np.count_nonzero(same) * SPARSE < size:
                places = np.flatnonzero(same)
        else:
            places = places[places >= length - 1]
            places = places[narrow[places - (length - 1)] == wanted]
            found[places] = length
        if places is not None and not len(places):
            break
    return found


def dry_of(params: SamplingParams, tokenizer: Tokenizer | None) -> Dry | None:
    """Return what a request says of repetitions; None: nothing.

    Raises:
        RequestError: there are breakers, and no tokenizer to find them in tokens.
    """
    if params.dry_multiplier == 0.0 or params.dry_penalty_last_n == 0:
        return None
    breakers = tuple(text.encode() for text in params.dry_sequence_breakers)
    if breakers and tokenizer is None:
        raise RequestError(
            "dry_sequence_breakers need a tokenizer and this engine has none; leave them empty",
            "dry_sequence_breakers",
        )
    return Dry(
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        params.dry_penalty_last_n,
        breakers,
        tokenizer,
    )


def with_penalties(
    bias_ids: Ids, bias: Floats, token_ids: Ids, penalties: Floats
) -> tuple[Ids, Floats]:
    """Return biases with others, each token once."""
    if not len(token_ids):
        return bias_ids, bias
    if not len(bias_ids):
        return token_ids, penalties
    all_ids, numbers = np.unique(np.concatenate((bias_ids, token_ids)), return_inverse=True)
    sums = np.zeros(len(all_ids), np.float32)
    np.add.at(sums, numbers, np.concatenate((bias, penalties)))
    return all_ids, sums
