"""Guessing by what came before, in the request's own text and in the answers to others.

After SuffixDecoding (arXiv 2411.04975), with the bounds that vLLM has for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from onnxport.serving.request import Request
from onnxport.serving.speculation.continuations import (
    NOTHING,
    Draft,
    likeliest,
    longest_drafts,
)
from onnxport.serving.speculation.past_answers import PastAnswers
from onnxport.serving.speculation.suffix_index import (
    Ending,
    GramHash,
    Match,
    SuffixIndex,
    longest_of,
)

LEAST_ROOM = 256  # tokens that an index of one text has room for, at first
MOST_READ = 4096  # tokens of long texts that are read at once: all wait for the step


class SuffixDrafter:
    """Looks up the end of a sequence in itself and in answers that ended before.

    The longest match says what comes: what followed its latest occurrences most often. Of the
    sequence's own and that of the answers, the one counts of which more tokens are expected to be
    right. Answers are found for requests of the same tenant, cache salt and adapter alone.
    """

    def __init__(
        self,
        depth: int,
        factor: float,
        least: float,
        *,
        most_answers: int,
        most_tokens: int,
    ) -> None:
        """Keep no answers yet.

        Args:
            depth: most tokens of a match and what is guessed by it, together; 2 or more.
            factor: how many tokens are guessed for each of the match, at most.
            least: the least probability of a guess; see `likeliest`.
            most_answers: kept at once; 0: sequences are looked up in themselves alone.
            most_tokens: of these answers.
        """
        assert depth >= 2
        self._hashing = GramHash(depth - 1)
        self._longest = longest_drafts(depth, factor)
        self._least = least
        self._texts: dict[Request, OwnText] = {}
        self._may_read = MOST_READ  # tokens, of all texts, until the next call
        self._answers: PastAnswers | None = None
        if most_answers:
            self._answers = PastAnswers(most_answers, most_tokens, self._hashing)

    @property
    def answers(self) -> PastAnswers | None:
        """The answers that are kept; None: none ever are."""
        return self._answers

    @property
    def is_cheap(self) -> bool:
        """It is: some look-ups in arrays."""
        return True

    def num_behind(self, request: Request) -> int:
        """Return 0: nothing has to be computed."""
        return 0

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """See `Drafter.propose`."""
        self._may_read = MOST_READ
        return [
            self._guess(request, length) if length > 0 else ()
            for request, length in zip(requests, lengths, strict=True)
        ]

    def _guess(self, request: Request, length: int) -> Sequence[int]:
        ending = self._hashing.ending(request.tokens)
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = OwnText(self._hashing)
        own = NOTHING
        num_read = text.num_read
        is_read = text.read(request.tokens, ending, self._may_read)
        self._may_read -= max(0, text.num_read - num_read - 1)  # one is a step's own
        if is_read:
            match = text.longest(ending)
            own = self._draft(text, match, length)
        answers = self._answers
        if answers is None or request.params.skip_reading_prefix_cache:
            return own.tokens
        match = answers.longest(owner_key(request), ending)
        other = self._draft(answers, match, length)
        return other.tokens if other.expected > own.expected else own.tokens

    def _draft(self, source: OwnText | PastAnswers, match: Match, length: int) -> Draft:
        """Return what a match says that follows."""
        length = min(length, self._longest[match.length])
        if not length:
            return NOTHING
        return likeliest(source.following(match.ends, length), length, self._least)

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`; the answer of a request that has ended is kept, each time.

        Of a beam search only the best one is: the others are much the same.
        """
        self._texts.pop(request, None)
        if request.beams is not None and request.index:
            return
        if self._answers is not None and request.finish_reason not in (None, "error"):
            self._answers.add(owner_key(request), request.tokens, request.num_prompt_tokens)

    def close(self) -> None:
        """See `Drafter.close`."""
        self._texts.clear()
        if self._answers is not None:
            self._answers.clear()


def owner_key(request: Request) -> Hashable:
    """Return who may get guesses from a request's answer: who has the same key.

    The adapter and cache salt, as for cached K/V, and the tenant too: a prefix that is cached shows
    only to who sends all of it, and an answer would to who sends a few of its tokens.
    """
    adapter = None if request.adapter is None else request.adapter.fingerprint
    return adapter, request.options.cache_salt, request.options.tenant


class OwnText:
    """One sequence, prompt and output, and where its n-grams are; grows with it."""

    __slots__ = ("_hashing", "_index", "_num_read", "_sums")

    def __init__(self, hashing: GramHash) -> None:
        """Begin with an empty one."""
        self._hashing = hashing
        self._index = SuffixIndex(LEAST_ROOM, hashing)
        self._num_read = 0
        self._sums: Sequence[int] | None = None  # of the end of what was read, if they are known

    @property
    def num_read(self) -> int:
        """Tokens that were read."""
        return self._num_read

    def read(self, tokens: array[int], ending: Ending, most: int = MOST_READ) -> bool:
        """Note what is new in `tokens`, but for the n-grams at the very end.

        Args:
            tokens: those of the call before, and more.
            ending: of them.
            most: tokens that may be read now, beside one.

        Returns:
            Whether all was read; a long text is read in parts.
        """
        known, number, index = self._num_read, len(tokens), self._index
        if number > index.capacity:
            room = 1 << number.bit_length()
            index = self._index = SuffixIndex(room, self._hashing)
            known = 0
        margin = index.margin
        new = min(number, known + max(1, most))
        if new > known:
            index.tokens[margin + known : margin + new] = tokens[known:new]
            first = max(1, known)
            if new == known + 1 and self._sums is not None:
                index.add_one(margin + known, self._sums)
            elif new > first:
                index.add(margin + first, margin + new - 1)
        self._num_read = new
        self._sums = ending.sums if new == number else None
        return new == number

    def longest(self, ending: Ending) -> Match:
        """Return where it has the longest match of its own end."""
        index = self._index
        return longest_of(index.longest(ending, index.margin, self._num_read))

    def following(self, ends: Sequence[int], length: int) -> list[bytes]:
        """Return `length` tokens behind each of some ends; see `likeliest`.

        What reaches the text's end goes on with itself, as a loop does.
        """
        view, stop = self._index.view, self._index.margin + self._num_read
        rows = []
        for end in ends:
            row = view[end : min(end + length, stop)].tobytes()
            repeated = row * -(-length * view.itemsize // len(row))
            rows.append(repeated[: length * view.itemsize])
        return rows
