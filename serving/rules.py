"""What a request wants changed in its logits: checked once, then followed token by token.

`LogitRules` is what the parameters say, one for all sequences of a request. `SequenceRules` is
where a sequence stands: what its tokens make of the rules. It reads nothing but the tokens, each of
them once, so preemption, batches, forks and drafts leave no trace in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.graphs.contract import mask_words
from onnxport.serving.dry import Dry, Repetitions, with_penalties
from onnxport.serving.edits import (
    NO_IDS,
    NO_VALUES,
    Addresses,
    Floats,
    Ids,
    RowEdits,
    address_of,
)
from onnxport.serving.params import SamplingParams
from onnxport.serving.recent import RecentCounts
from onnxport.serving.thought_budget import OneToken, SequenceBudget, ThoughtBudget
from onnxport.serving.token_counts import TokenCounts

Encode = Callable[[Sequence[str]], list[list[int]]]  # several texts at once
Words = tuple[tuple[int, ...], ...]
_NO_IDS_AT: Final = address_of(NO_IDS)
_NO_VALUES_AT: Final = address_of(NO_VALUES)


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What the parameters of a request say of its logits.

    Attributes:
        bias_ids: tokens whose logits change, int64.
        bias: what is added to them, float32.
        banned: tokens that are never drawn: the bad words of one token.
        bad_words: the longer ones, by their last token but one.
        early: tokens that are not drawn before there are `min_tokens` of output.
        min_tokens: see `early`.
        allowed: the only tokens that are drawn, ascending; None: all.
        allowed_words: the same as `StepInputs.allowed_tokens` has it, int32 [mask_words(vocab)].
        repetition: 1 is no penalty.
        presence: 0 is no penalty.
        frequency: 0 is no penalty.
        budget: of thinking; None: there is none.
        dry: of repetitions; None: they are as good as anything.
        last_n: how many of the last tokens, of prompt and output, the penalties count; -1 all, 0
            none. None: see `SamplingParams.repeat_last_n`.
    """

    bias_ids: Ids
    bias: Floats
    banned: Ids
    bad_words: dict[int, Words]
    early: Ids
    min_tokens: int
    allowed: Ids | None
    allowed_words: NDArray[np.int32] | None
    repetition: float
    presence: float
    frequency: float
    budget: ThoughtBudget | None = None
    dry: Dry | None = None
    last_n: int | None = None

    @property
    def penalizes(self) -> bool:
        """Whether tokens have to be counted."""
        if self.last_n == 0:
            return False
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0

    def most_lowered(self, num_prompt: int, num_output: int) -> int | None:
        """Return how many tokens' logits may fall, at most.

        None, if a logit may rise, or only those of a few tokens are left.

        Args:
            num_prompt: tokens of the prompt.
            num_output: most tokens that may follow.
        """
        falls = self.repetition >= 1.0 and self.presence >= 0.0 and self.frequency >= 0.0
        if self.allowed is not None or not falls or (self.bias > 0.0).any():
            return None
        ends = (word[-1] for words in self.bad_words.values() for word in words)
        named = {*self.bias_ids.tolist(), *self.banned.tolist(), *self.early.tolist(), *ends}
        return len(named) + self._most_counted(num_prompt, num_output)

    def _most_counted(self, num_prompt: int, num_output: int) -> int:
        """Return how many tokens of prompt and output may be made less likely, at most."""
        everything = num_prompt + num_output
        if self.dry is not None:
            return everything
        if not self.penalizes:
            return 0
        if self.last_n is not None:
            return everything if self.last_n < 0 else min(self.last_n, everything)
        return everything if self.repetition != 1.0 else num_output


class SequenceRules:
    """What the rules of a request make of one sequence."""

    __slots__ = (
        "_at",
        "_banned",
        "_banned_early",
        "_budget",
        "_counts",
        "_num_prompt",
        "_repetitions",
        "_rules",
    )

    def __init__(self, rules: LogitRules, num_prompt_tokens: int) -> None:
        """Take the rules of a sequence that begins with a prompt of so many tokens."""
        self._rules = rules
        self._num_prompt = num_prompt_tokens
        # Made when it is needed, by the engine's thread.
        self._counts: TokenCounts | RecentCounts | None = None
        allowed_at = 0 if rules.allowed is None else address_of(rules.allowed)
        self._at = (address_of(rules.bias_ids), address_of(rules.bias), allowed_at)
        self._banned = _Banned(rules.banned, address_of(rules.banned))
        early = np.concatenate((rules.banned, rules.early))
        self._banned_early = _Banned(early, address_of(early))
        budget = rules.budget
        self._budget = None if budget is None else SequenceBudget(budget, num_prompt_tokens)
        self._repetitions = None if rules.dry is None else Repetitions(rules.dry, num_prompt_tokens)

    def fork(self) -> SequenceRules:
        """Return one that has read the same tokens, and goes on on its own."""
        other = copy(self)
        other._counts = None if self._counts is None else self._counts.fork()
        other._budget = None if self._budget is None else self._budget.fork()
        other._repetitions = None if self._repetitions is None else self._repetitions.fork()
        return other

    def end_thought(self) -> bool:
        """Let no more of a thought come; returns whether there may be one, and it has a budget."""
        return self._budget is not None and self._budget.end()

    def edits(self, tokens: array[int], assumed: Sequence[int] = ()) -> RowEdits:
        """Return what changes in the logits of the next token.

        Args:
            tokens: the prompt and the output so far; those of the call before, and more.
            assumed: tokens that are taken to follow, for this call alone.
        """
        forced = None if self._budget is None else self._budget.forced(tokens, assumed)
        if forced is not None:
            return self._only(forced, tokens, assumed)
        rules = self._rules
        seen, counts, seen_at, counts_at = NO_IDS, NO_VALUES, 0, 0
        if rules.penalizes:
            if self._counts is None:
                self._counts = self._new_counts(tokens)
            seen, counts = self._counts.read(tokens)
            seen_at, counts_at = self._counts.addresses
            if assumed:
                seen, counts = self._counts.with_more(assumed)
        banned, banned_at = self._bans(tokens, assumed)
        bias_ids_at, bias_at, allowed_at = self._at
        bias_ids, bias = rules.bias_ids, rules.bias
        if self._repetitions is not None:
            found = self._repetitions.penalties(tokens, assumed)
            bias_ids, bias = with_penalties(bias_ids, bias, *found)
        addresses = None
        if banned_at is not None and not assumed and bias_ids is rules.bias_ids:
            addresses = Addresses(bias_ids_at, bias_at, banned_at, seen_at, counts_at, allowed_at)
        return RowEdits(
            bias_ids,
            bias,
            banned,
            seen,
            counts,
            rules.repetition,
            rules.presence,
            rules.frequency,
            rules.allowed,
            addresses,
        )

    def _new_counts(self, tokens: array[int]) -> TokenCounts | RecentCounts:
        """Return what counts tokens, with none of them read but the prompt."""
        rules = self._rules
        if rules.last_n is not None:
            return RecentCounts(rules.last_n)
        first = 0 if rules.repetition != 1.0 else self._num_prompt
        return TokenCounts(tokens[first : self._num_prompt], self._num_prompt)

    def _only(self, forced: OneToken, tokens: array[int], assumed: Sequence[int]) -> RowEdits:
        """Return what leaves one token alone: whatever its logit is, unless it is banned."""
        banned, banned_at = self._bans(tokens, assumed)
        addresses = None
        if banned_at is not None:
            ids_at, values_at = _NO_IDS_AT, _NO_VALUES_AT
            addresses = Addresses(ids_at, values_at, banned_at, ids_at, values_at, forced.address)
        return RowEdits(banned=banned, allowed=forced.ids, addresses=addresses)

    def _bans(self, tokens: array[int], assumed: Sequence[int]) -> _Banned:
        """Return what must not come next: whole bad words, ends of begun ones, early ends."""
        rules = self._rules
        num_output = len(tokens) + len(assumed) - self._num_prompt
        if assumed and rules.bad_words:  # which look back no further than the longest of them
            longest = max(len(word) for words in rules.bad_words.values() for word in words)
            tokens = tokens[-longest:] + array(tokens.typecode, assumed)
        banned = self._banned_early if num_output < rules.min_tokens else self._banned
        if rules.bad_words and num_output and (words := rules.bad_words.get(tokens[-1])):
            ends = [
                word[-1]
                for word in words
                if len(word) - 1 <= num_output and tuple(tokens[1 - len(word) :]) == word[:-1]
            ]
            if ends:
                return _Banned(np.concatenate((banned.ids, np.array(ends, np.int64))), None)
        return banned


class _Banned(NamedTuple):
    """Tokens that must not come next, and where they are in memory."""

    ids: Ids
    address: int | None  # None: they are of this step alone


def logit_rules(
    params: SamplingParams,
    end_ids: Iterable[int],
    vocab_size: int,
    encode: Encode | None,
    budget: ThoughtBudget | None = None,
    dry: Dry | None = None,
) -> LogitRules | None:
    """Return the rules of a request; None if its parameters change no logits.

    Args:
        params: of the request.
        end_ids: tokens that would end it, whether it obeys them or not.
        vocab_size: of the model.
        encode: turns text into tokens and adds none; None without a tokenizer.
        budget: of the request's thinking; None: there is none.
        dry: what the request says of repetitions; None: nothing.

    Raises:
        RequestError: a token is not the model's, there is no tokenizer for `bad_words`, no token is
            left to draw, or one that closes a thought is forbidden.
    """
    biases = dict(params.logit_bias)
    check_ids("logit_bias", biases, vocab_size)
    check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    # A word with a token that the model cannot draw never comes.
    words = [word for word in _bad_words(params.bad_words, encode) if max(word) < vocab_size]
    allowed = params.allowed_token_ids
    ends = {one for one in end_ids if one < vocab_size} if params.min_tokens else set()
    rules = LogitRules(
        np.array(list(biases), np.int64),
        np.array(list(biases.values()), np.float32),
        np.array([word[0] for word in words if len(word) == 1], np.int64),
        _by_last_but_one(words),
        np.array(sorted(ends), np.int64),
        params.min_tokens if ends else 0,
        None if allowed is None else np.unique(np.array(allowed, np.int64)),
        None if allowed is None else _words(allowed, vocab_size),
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        budget,
        dry,
        params.repeat_last_n,
    )
    _check_choice(rules)
    if budget is not None:
        _check_budget(rules, budget)
    changes = biases or words or rules.min_tokens or allowed is not None or rules.penalizes
    return rules if changes or budget is not None or dry is not None else None


def _words(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Return words with the bits of some tokens, int32 [mask_words(vocab_size)]."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise RequestError for a token that the model does not have."""
    if bad := [one for one in token_ids if one >= vocab_size]:
        raise RequestError(
            f"{name} holds token {bad[0]}; the model's tokens are 0 to {vocab_size - 1}. Remove it",
            name,
        )


def _bad_words(texts: Sequence[str], encode: Encode | None) -> list[tuple[int, ...]]:
    """Return the tokens of each text, and of the text after a space, as vLLM does.

    vLLM leaves the second out where it has more tokens or fewer than the first; here both are bad.
    Of a text that is white space, such as an end of a line, only itself is.

    Raises:
        RequestError: there is no tokenizer, or a text has no tokens.
    """
    if not texts:
        return []
    if encode is None:
        raise RequestError("bad_words need a tokenizer and this engine has none", "bad_words")
    spellings = []
    for text in texts:
        word = text.lstrip()
        spellings += [word, " " + word] if word else [text]
    words = list(map(tuple, encode(spellings)))
    if () in words:
        text = spellings[words.index(())]
        raise RequestError(f"bad_words holds {text!r}, which has no tokens; remove it", "bad_words")
    return list(dict.fromkeys(words))


def _by_last_but_one(words: Iterable[tuple[int, ...]]) -> dict[int, Words]:
    """Return the words of two tokens or more, by the token before their last."""
    found: dict[int, Words] = {}
    for word in words:
        if len(word) > 1:
            found[word[-2]] = (*found.get(word[-2], ()), word)
    return found


def _check_choice(rules: LogitRules) -> None:
    """Raise RequestError if nothing can be drawn as the first token."""
    if rules.allowed is None:
        return
    if not len(np.setdiff1d(rules.allowed, np.concatenate((rules.banned, rules.early)))):
        raise RequestError(
            f"allowed_token_ids are {rules.allowed[:10].tolist()}, and bad_words and min_tokens "
            "(which bans the end tokens at first) forbid all of them; allow more tokens",
            "allowed_token_ids",
        )


def _check_budget(rules: LogitRules, budget: ThoughtBudget) -> None:
    """Raise RequestError if what closes a thought must not be drawn."""
    for spelling, tag in zip(budget.spellings, budget.thought.closes, strict=True):
        needed = np.array(spelling, np.int64)
        reasons = {
            "allowed_token_ids": rules.allowed is not None
            and not np.isin(needed, rules.allowed).all(),
            "bad_words": bool(np.isin(needed, rules.banned).any())
            or any(_is_within(word, spelling) for one in rules.bad_words.values() for word in one),
            "min_tokens": rules.min_tokens > budget.least_output
            and bool(np.isin(needed, rules.early).any()),
        }
        if forbidding := [name for name, forbids in reasons.items() if forbids]:
            raise RequestError(
                f"thinking_token_budget is {budget.num_tokens}, behind which a thought is closed "
                f"with {tag!r}, tokens {list(spelling)}, and {' and '.join(forbidding)} must not "
                "forbid these; change one of them",
                forbidding[0],
            )


def _is_within(word: tuple[int, ...], spelling: tuple[int, ...]) -> bool:
    """Whether some tokens stand in others, side by side."""
    return any(spelling[at : at + len(word)] == word for at in range(len(spelling)))
