"""Where one sequence stands in its grammar: the `Grammar` of `serving/grammar.py`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from onnxport.serving.grammar import ForbiddenTokenError, GrammarError
from onnxport.serving.structured.kept import MaskMemory
from onnxport.serving.structured.vocabulary import Vocabulary


class SequenceGrammar:
    """The grammar of one sequence; reads each token of its output once. One thread at a time."""

    __slots__ = ("_goes_back", "_kept", "_matcher", "_memory", "_num_read", "_place", "_vocabulary")

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        num_prompt_tokens: int,
        kept: MaskMemory | None = None,
        *,
        goes_back: bool = True,
    ) -> None:
        """Begin after the prompt.

        Args:
            matcher: at the beginning of the grammar; nobody else's.
            vocabulary: of the model.
            num_prompt_tokens: how many tokens of the sequence the grammar does not look at.
            kept: masks of this grammar; None: it does not tell its states apart.
            goes_back: whether the matcher can take tokens back; if not, a copy of it looks ahead.
        """
        self._goes_back = goes_back
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_read = num_prompt_tokens
        self._kept = kept
        self._place = kept.start if kept else None
        self._memory: NDArray[np.int32] = np.empty((0, vocabulary.num_all_words), np.int32)

    def fork(self) -> SequenceGrammar:
        """See `Grammar.fork`."""
        matcher = self._matcher.deep_copy()
        other = SequenceGrammar(
            matcher, self._vocabulary, self._num_read, self._kept, goes_back=self._goes_back
        )
        other._place = self._place
        return other

    def masks(self, tokens: array[int], draft: Sequence[int] = ()) -> NDArray[np.uint32]:
        """Return which tokens may come next; see `Grammar.masks`.

        Raises:
            GrammarError: a limit is reached.
            ForbiddenTokenError: a token came that may not.
        """
        self._read(tokens)
        if len(self._memory) <= len(draft):
            shape = (len(draft) + 1, self._vocabulary.num_all_words)
            self._memory = np.zeros(shape, np.int32)
        rows = self._memory[: len(draft) + 1]
        matcher = self._ahead() if draft else self._matcher
        num_taken = 0
        place = self._place
        for number, token_id in enumerate(draft):
            self._fill(matcher, number, place)
            num_taken += self._take(matcher, [token_id])
            place = self._after(place, [token_id])
        self._fill(matcher, len(draft), place)
        if num_taken and matcher is self._matcher:
            matcher.rollback(num_taken)
        _check(matcher)
        masks = rows[:, : self._vocabulary.num_words].view(np.uint32)
        if spare := self._vocabulary.vocab_size % 32:
            masks[:, -1] &= np.uint32((1 << spare) - 1)
        return masks

    def num_possible(self, tokens: array[int], draft: Sequence[int]) -> int:
        """Return how many of the first tokens of `draft` may follow `tokens`.

        None, when the grammar has failed: `masks` tells why.
        """
        try:
            self._read(tokens)
        except (GrammarError, ForbiddenTokenError):
            return 0
        size = self._vocabulary.tokens.vocab_size
        known = list(takewhile(lambda token_id: token_id < size, draft))
        matcher = self._ahead()
        num_taken = matcher.try_consume_tokens(known)
        ends = self._is_end(matcher, known[num_taken : num_taken + 1])
        if num_taken and matcher is self._matcher:
            matcher.rollback(num_taken)
        return num_taken + ends

    def forced(self, tokens: array[int], most: int) -> Sequence[int]:
        """See `Grammar.forced`. None, when the grammar has failed: `masks` tells why."""
        try:
            self._read(tokens)
        except (GrammarError, ForbiddenTokenError):
            return ()
        if self._matcher.is_stopped():
            return ()
        if not self._matcher.compute_ff_bytes():  # only after this call there may be tokens
            return ()
        size = self._vocabulary.vocab_size
        found = self._matcher.compute_ff_tokens()[:most]
        return list(takewhile(lambda token_id: token_id < size, found))

    def is_complete(self, tokens: array[int]) -> bool:
        """Whether the output is whole and nothing may follow it but an end token.

        Raises:
            GrammarError, ForbiddenTokenError: as `masks`.
        """
        self._read(tokens)
        _check(self._matcher)
        if self._matcher.is_stopped():
            return True
        if self._vocabulary.has_end or not self._matcher.is_accepting():
            return False
        return not self.masks(tokens).any()  # nothing but an end that the model cannot write

    def _read(self, tokens: array[int]) -> None:
        """Take the tokens that are new."""
        new = tokens[self._num_read :].tolist()
        if new:
            self._take(self._matcher, new)
            self._num_read = len(tokens)
            self._place = self._after(self._place, new)

    def _ahead(self) -> LLMatcher:
        """Return what may read tokens that have not come yet, and take them back if it is ours."""
        return self._matcher if self._goes_back else self._matcher.deep_copy()

    def _take(self, matcher: LLMatcher, token_ids: list[int]) -> int:
        """Move on; returns how many tokens the matcher took, which knows no end after the end."""
        num_taken = matcher.try_consume_tokens(token_ids)
        if num_taken < len(token_ids):
            _check(matcher)
            if not self._is_end(matcher, token_ids[num_taken:]):
                if num_taken:  # whoever asks again is told of the same token
                    matcher.rollback(num_taken)
                raise ForbiddenTokenError(
                    f"token {token_ids[num_taken]} came, which the grammar forbids"
                )
        return num_taken

    def _is_end(self, matcher: LLMatcher, token_ids: list[int]) -> bool:
        """Whether a list is an end token, where nothing else may come."""
        one = len(token_ids) == 1 and token_ids[0] in self._vocabulary.tokens.eos_tokens
        return one and matcher.is_stopped() and not matcher.is_error()

    def _after(self, place: Any | None, token_ids: list[int]) -> Any | None:
        """Return where the text ends after more tokens, which the matcher has taken."""
        return self._kept.after(place, token_ids) if self._kept else None

    def _fill(self, matcher: LLMatcher, number: int, place: Any | None) -> None:
        """Write what may come next into a row of the memory."""
        row = self._memory[number]
        if not (self._kept and self._kept.read(place, row)):
            fill_next_token_bitmask(matcher, self._memory, number)
            if self._kept and not matcher.is_error():
                self._kept.write(place, row)
        if self._vocabulary.text_ends and not matcher.is_accepting():  # would end it all the same
            for token_id in self._vocabulary.text_ends:
                row.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(" ".join(matcher.get_error().split())[:300])
