"""A budget for thinking: after so many tokens a thought is closed, and the answer begins.

Where a thought is still open when its budget is used up, only the next token of its closing tag may
come, one after the other, until the tag is whole; then decoding goes on freely. What a token is
follows from the tokens before it alone, so preemption, batches, forks and drafts leave no trace in
it. A thought is what `ReasoningSplitter` takes for one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from onnxport.errors import RequestError
from onnxport.serving.channels import Channels
from onnxport.serving.detokenizer import MAX_CHARACTER
from onnxport.serving.edits import Ids, address_of
from onnxport.serving.params import SamplingParams
from onnxport.serving.text import longest_beginning
from onnxport.serving.thoughts import ReasoningSplitter, Thought, first_of
from onnxport.serving.tokenizer import Tokenizer

NAME: Final = "thinking_token_budget"
# A character that is begun when a budget is used up may go on for so many tokens as it likes; then
# each token is a byte that goes on with it.
MOST_FREE: Final = MAX_CHARACTER - 1
# The least byte that may go on with a character, where not every one may. Source: RFC 3629.
NEXT_BYTES: Final[Mapping[bytes, int]] = {b"\xe0": 0xA0, b"\xf0": 0x90}
NEXT_BYTE: Final = 0x80


class OneToken(NamedTuple):
    """The only token that may come, as `RowEdits.allowed` has it."""

    ids: Ids  # [1]
    address: int


@dataclass(frozen=True, slots=True)
class ThoughtBudget:
    """What a request may think, one for all of its sequences.

    Attributes:
        num_tokens: that may come while a thought is open; behind them it is closed.
        thought: that the output may begin with.
        tokenizer: of the model.
        spellings: the tokens of each closing tag.
        closing: the token that may come, by what of a closing tag a thought ends with; what is not
            there, and "", goes on with the first tag as a whole.
        in_characters: likewise by the byte that goes on with a character; what is not there may not
            come, or is no token of its own.
    """

    num_tokens: int
    thought: Thought
    tokenizer: Tokenizer
    spellings: tuple[tuple[int, ...], ...]
    closing: Mapping[str, OneToken]
    in_characters: Mapping[int, OneToken]

    @property
    def least_output(self) -> int:
        """How many tokens of output there are, at least, when one has to come."""
        return self.num_tokens + (0 if self.thought.is_open else 1)


class SequenceBudget:
    """What is left of the budget of one sequence; reads each token of its output once."""

    __slots__ = ("_budget", "_num_read", "_num_thought", "_splitter")

    def __init__(self, budget: ThoughtBudget, num_prompt_tokens: int) -> None:
        """Begin behind a prompt of so many tokens."""
        self._budget = budget
        self._num_read = num_prompt_tokens
        self._num_thought = 0  # tokens that came while the thought was open
        self._splitter: ReasoningSplitter | None = ReasoningSplitter(budget.thought)

    def forced(self, tokens: array[int], assumed: Sequence[int] = ()) -> OneToken | None:
        """Return the only token that may come next; None: any may, as far as the budget goes.

        Args:
            tokens: the prompt and the output so far; those of the call before, and more.
            assumed: tokens that are taken to follow, for this call alone.
        """
        splitter = self._splitter
        if splitter is None:
            return None
        self._num_thought += self._read(splitter, tokens[self._num_read :])
        self._num_read = len(tokens)
        if _is_past(splitter):
            self._splitter = None
            return None
        num_thought = self._num_thought
        if assumed:
            splitter = copy(splitter)
            num_thought += self._read(splitter, assumed)
        budget = self._budget
        if not splitter.is_thinking or num_thought < budget.num_tokens:
            return None
        if pending := budget.tokenizer.pending(chain(reversed(assumed), reversed(tokens))):
            if num_thought < budget.num_tokens + MOST_FREE:
                return None
            byte = NEXT_BYTES.get(pending, NEXT_BYTE)
            if byte in budget.in_characters:
                return budget.in_characters[byte]
        return budget.closing.get(splitter.begun_close, budget.closing[""])

    def end(self) -> bool:
        """Let no more of a thought come; returns whether there may be one."""
        if self._splitter is None:
            return False
        most = min(self._budget.num_tokens, self._num_thought)
        self._budget = replace(self._budget, num_tokens=most)
        return True

    def fork(self) -> SequenceBudget:
        """Return one that has read the same tokens, and goes on on its own."""
        other = copy(self)
        other._splitter = copy(self._splitter)
        return other

    def _read(self, splitter: ReasoningSplitter, token_ids: Iterable[int]) -> int:
        """Take the next tokens; returns how many of them came while the thought was open."""
        num_thought = 0
        for token_id in token_ids:
            if _is_past(splitter):
                break
            num_thought += splitter.is_thinking
            splitter.feed(self._budget.tokenizer.token_text(token_id))
        return num_thought


def _is_past(splitter: ReasoningSplitter) -> bool:
    """Whether no thought is open, and none can be opened any more."""
    return splitter.is_answering or (splitter.has_thought and not splitter.is_thinking)


def with_thought(
    params: SamplingParams, thought: Thought | Channels | None, *, is_known: bool
) -> SamplingParams:
    """Return parameters whose `thinking_token_budget` is that of an answer's reasoning.

    Args:
        params: that may have a budget.
        thought: what the answer may begin with; None: nothing of it is reasoning, and no budget is
            needed.
        is_known: whether it is known how the model writes its reasoning.

    Raises:
        RequestError: there is a budget, and it is not known, or cannot be obeyed.
    """
    most = params.thinking_token_budget
    if most is None:
        return params
    if not is_known:
        raise RequestError(
            f"{NAME} is {most}, and it is not known how this model writes its reasoning; leave it "
            "out, or name the format with --reasoning-parser where the model is served",
            NAME,
        )
    if isinstance(thought, Channels):
        raise RequestError(
            f"{NAME} is {most}, and this model writes its reasoning in messages, as many as it "
            "likes, before and between calls, which no tag closes; leave it out, and send a "
            "reasoning_effort",
            NAME,
        )
    if thought is None or thought.is_past:
        return replace(params, thinking_token_budget=None)
    return replace(params, thought=thought)


def thought_budget(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
) -> ThoughtBudget | None:
    """Return the budget of a request; None: it has none.

    Args:
        params: of the request.
        tokenizer: of the model; None: there is none.
        vocab_size: of the model.

    Raises:
        RequestError: it is not told what a thought is, or the model cannot write what closes one.
    """
    most, thought = params.thinking_token_budget, params.thought
    if most is None:
        return None
    if thought is None:
        raise RequestError(
            f"{NAME} is {most}, and nothing says what a thought is here; give SamplingParams a "
            "`thought`, or use a chat, whose template tells",
            NAME,
        )
    form = params.structured_outputs
    if form is not None and form.thought != thought:
        raise RequestError(
            f"{NAME} is {most}, and structured_outputs has another thought than the parameters, or "
            "none, so the form would have to hold what closes it; give both the same",
            NAME,
        )
    if tokenizer is None:
        raise RequestError(f"{NAME} needs a tokenizer and this engine has none", NAME)
    spellings = tuple(_spelling(tokenizer, tag, vocab_size) for tag in thought.closes)
    if form is not None and any(map(tokenizer.is_special, chain.from_iterable(spellings))):
        raise RequestError(
            f"{NAME} is {most}, and {thought.closes[0]!r}, which closes a thought, is a special "
            "token, which no form holds; leave out one of them, or open the tokenizer with "
            "what closes thoughts as its `texts`",
            NAME,
        )
    closing: dict[str, int] = {}
    for tag, spelling in zip(thought.closes, spellings, strict=True):
        texts = [tokenizer.token_text(one) for one in spelling]
        before = sum(map(len, texts)) - len(tag)  # a space that the tokenizer puts there
        for number, token_id in enumerate(spelling):
            closing.setdefault("".join(texts[:number])[before:], token_id)
    _check_closes(tokenizer, thought.closes, closing)
    allowed = params.allowed_token_ids
    known = range(vocab_size) if allowed is None else frozenset(allowed)
    tokens = ((byte, tokenizer.byte_token(byte)) for byte in (NEXT_BYTE, *NEXT_BYTES.values()))
    return ThoughtBudget(
        most,
        thought,
        tokenizer,
        spellings,
        {begun: _one_token(token_id) for begun, token_id in closing.items()},
        {byte: _one_token(one) for byte, one in tokens if one is not None and one in known},
    )


def _one_token(token_id: int) -> OneToken:
    ids = np.array([token_id], np.int64)
    return OneToken(ids, address_of(ids))


def _spelling(tokenizer: Tokenizer, tag: str, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens of a closing tag; there may be a space before it.

    Raises:
        RequestError: the model has none.
    """
    spelling = tokenizer.encode(tag, add_special_tokens=False)
    text = "".join(map(tokenizer.token_text, spelling))
    if text not in (tag, f" {tag}") or max(spelling) >= vocab_size:
        raise _unspelled(tag)
    return tuple(spelling)


def _check_closes(tokenizer: Tokenizer, tags: tuple[str, ...], closing: Mapping[str, int]) -> None:
    """Raise RequestError unless the tokens that are forced close a thought, whatever it ends with.

    What of a tag it ends with next follows from what it ends with now, and from the token.
    """
    closes: set[str] = set()  # ends of thoughts that are known to be gone on with to a whole tag
    for tag in tags:
        for length in range(len(tag)):
            text, passed = tag[:length], set[str]()
            while text not in closes and first_of(text, tags) is None:
                if text in passed:
                    raise _unspelled(tag)
                passed.add(text)
                text += tokenizer.token_text(closing.get(text, closing[""]))
                if first_of(text, tags) is None:
                    text = text[len(text) - longest_beginning(text, tags) :]
            closes |= passed


def _unspelled(tag: str) -> RequestError:
    return RequestError(
        f"{NAME} was given, and this model has no tokens that spell {tag!r}, which would close a "
        "thought; leave it out",
        NAME,
    )
