"""Beam search: the likeliest outputs of a prompt, looked for round by round.

The rules are vLLM's. In a round each beam names the likeliest tokens that may follow it, twice as
many as there are beams. Those that end a text make it a finished one. Of the others, over all
beams, the `width` best go on. At the end finished texts and beams are compared by

    sum of log probabilities / length ** length_penalty

where the length is that of prompt and output, without the token that ended it. The search is over
when there are `max_tokens`, or earlier if no beam can get better than all that is to be returned:
log probabilities are never above 0, so that what a beam may still reach has a bound.

Beams are sequences of the engine like others, one a slot, and what they have in common is in the
cache once. After a round a slot may hold another beam: it goes on from the blocks of that beam's
parent, copy on write. Slots without a beam keep their rows, and wait as siblings of the first one.

Beams that yield are given up together. What waits is their common beginning, in the first slot;
where they parted, they are computed again token by token, as known ones, which is exact and holds
no more blocks than before.
"""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onnxport.kv.groups import CacheGroups
from onnxport.kv.table import blocks_for
from onnxport.serving.grammar import Grammar
from onnxport.serving.request import Request
from onnxport.serving.rules import SequenceRules
from onnxport.serving.sampled import RowLogprobs
from onnxport.serving.text import TextStream


class Candidate(NamedTuple):
    """A token that may follow a beam."""

    token_id: int
    logprob: float  # never above 0, of what was drawn from if the beam were sampled
    told: RowLogprobs | None = None  # what is reported of it; None: nothing


@dataclass(frozen=True, slots=True)
class Told:
    """What is reported of the tokens of an output, the last one first: beginnings are shared."""

    row: RowLogprobs
    before: Told | None


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens with their log probability: a finished text, or a beam as far as it is known."""

    tokens: array[int]  # prompt and output
    logprob: float  # the sum over the output
    told: Told | None = None
    score: float = 0.0  # by which finished ones are compared


@dataclass(slots=True, eq=False)
class Beam:
    """A text that goes on, and the slot that computes it."""

    slot: Request
    logprob: float = 0.0
    told: Told | None = None
    stream: TextStream | None = None  # looks for stop strings; None: there are none


@dataclass(slots=True, eq=False)
class Child:
    """A beam of the next round."""

    parent: Beam
    text: Text
    stream: TextStream | None = None
    grammar: Grammar | None = None
    ends: bool = False  # by a stop string, or as its grammar has it


@dataclass(frozen=True, slots=True)
class Beginning:
    """Makes what belongs to a sequence of the request and has read no token of its output."""

    rules: Callable[[], SequenceRules | None]
    grammar: Callable[[], Grammar | None]
    stream: Callable[[], TextStream | None]


def together(request: Request) -> Sequence[Request]:
    """Return who yields with a running request: all beams of its search, or it alone."""
    return (request,) if request.beams is None else request.beams.running


def score(logprob: float, length: int, length_penalty: float) -> float:
    """Return by what texts are compared; the length is that of prompt and output."""
    return logprob / math.pow(length, length_penalty)


def best_possible(logprob: float, length: int, longest: int, length_penalty: float) -> float:
    """Return a score that no text exceeds which goes on from a beam.

    Args:
        logprob: of the beam.
        length: of the beam, prompt and output.
        longest: that a text may be.
        length_penalty: above 0 the longest one scores best, below the shortest.
    """
    return score(logprob, longest if length_penalty > 0.0 else length, length_penalty)


@dataclass(slots=True, eq=False)
class BeamGroup:
    """The beams of one request. Belongs to the engine's thread.

    Attributes:
        slots: the sequences of the request, as many as there may be beams.
        beginning: of each of them.
        live: the beams, the best first; all of one length.
        finished: the best texts that have ended, the best first, at most one a slot.
        found: what may follow the beams that have arrived in this round, by slot.
        behind: what the beams were when they yielded, the best first; empty if they are that.
    """

    slots: tuple[Request, ...]
    beginning: Beginning
    live: list[Beam] = field(init=False)
    finished: list[Text] = field(default_factory=list, init=False)
    found: dict[Request, tuple[Candidate, ...]] = field(default_factory=dict, init=False)
    behind: tuple[Text, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.live = [Beam(self.slots[0], stream=self._stream())]

    @property
    def width(self) -> int:
        """How many beams there may be."""
        return len(self.slots)

    @property
    def running(self) -> list[Request]:
        """The slots that hold blocks and rows, in the order of their ranks."""
        return [slot for slot in self.slots if slot.running]

    @property
    def has_arrived(self) -> bool:
        """Whether all beams have been computed up to their ends, so that the round can be."""
        return len(self.found) == len(self.live)

    @property
    def num_tokens(self) -> int:
        """How long the beams are, prompt and output."""
        return len(self.behind[0].tokens if self.behind else self.live[0].slot.tokens)

    def blocks_behind(self, groups: CacheGroups) -> int:
        """How many blocks beams that have yielded hold at once behind what they have in common."""
        block_size = groups.block_size
        common = len(self.slots[0].tokens) // block_size
        own = blocks_for(self.num_tokens, block_size) - common
        return len(self.behind) * groups.resident(own)

    def advance(self) -> list[Child]:
        """Take what was found in a round; returns the beams of the next one, the best first.

        None: the search is over, and `finished` has what came of it.

        Raises:
            GrammarError, ForbiddenTokenError: a grammar fails.
        """
        found, self.found = self.found, {}
        return self._catch_up() if self.behind else self._extend(found)

    def seat(self, children: Sequence[Child]) -> dict[Request, Child]:
        """Return which slot each beam of the next round takes; the first one is among them.

        A beam takes its parent's slot if no better one of that parent does.
        """
        seats: dict[Request, Child] = {}
        others: list[Child] = []
        for child in children:
            if seats.setdefault(child.parent.slot, child) is not child:
                others.append(child)
        first = self.slots[0]
        if first not in seats and not others:
            others.append(seats.popitem()[1])
        free = (slot for slot in self.slots if slot not in seats)
        seats.update({next(free): child for child in others})
        return seats

    def take(self, children: Sequence[Child], seats: Mapping[Request, Child]) -> None:
        """Begin the next round; the slots have the blocks of their parents already.

        Args:
            children: the beams.
            seats: as `seat` returned it.
        """
        slots = {child: slot for slot, child in seats.items()}
        rules: list[SequenceRules | None] = []
        known: set[Beam] = set()
        for child in children:
            own = child.parent.slot.rules
            if own is not None and child.parent in known:  # it goes on with another child
                own = own.fork()
            known.add(child.parent)
            rules.append(own)
        for child, own in zip(children, rules, strict=True):
            slot = slots[child]
            slot.tokens, slot.rules, slot.grammar = child.text.tokens, own, child.grammar
        self.live = [
            Beam(slots[child], child.text.logprob, child.text.told, child.stream)
            for child in children
        ]

    def give_up(self) -> None:
        """Let the first slot wait with what all beams begin with; no slot holds blocks any more."""
        texts = self.behind or tuple(
            Text(beam.slot.tokens, beam.logprob, beam.told) for beam in self.live
        )
        first, best = self.slots[0], texts[0]
        begins = best.tokens[: common_length([text.tokens for text in texts])]
        for slot in self.slots:
            slot.tokens = slot.tokens[: slot.num_prompt_tokens]
            slot.rules, slot.grammar = self.beginning.rules(), self.beginning.grammar()
        first.tokens = begins
        is_whole = len(begins) == len(best.tokens)  # there is one beam
        beam = Beam(first, best.logprob, best.told) if is_whole else Beam(first)
        beam.stream = self._read(self._stream(), begins)
        self.found, self.behind, self.live = {}, () if is_whole else texts, [beam]

    def drop(self) -> None:
        """The search ends without a result: who got tokens has those of the best beam."""
        best = self.behind[0].tokens if self.behind else self.live[0].slot.tokens
        for slot in self.slots:
            has_some = slot.times.first_token_s is not None
            slot.tokens = best if has_some else slot.tokens[: slot.num_prompt_tokens]

    def _extend(self, found: Mapping[Request, Sequence[Candidate]]) -> list[Child]:
        first = self.slots[0]
        penalty, longest = first.params.length_penalty, first.max_total_tokens
        length = self.num_tokens + 1
        pairs = [(beam, one) for beam in self.live for one in found[beam.slot]]
        pairs.sort(key=lambda pair: pair[0].logprob + pair[1].logprob, reverse=True)
        children: list[Child] = []
        num_last = 0
        for beam, candidate in pairs:
            if candidate.token_id in first.stop_token_ids:
                self._finish(_longer(beam, candidate), length - 1)
            elif len(children) + num_last < self.width:
                child = self._child(beam, candidate)
                if child.ends or length >= longest:
                    num_last += not child.ends
                    self._finish(child.text, length)
                else:
                    children.append(child)
        if children and len(self.finished) == self.width:
            best = best_possible(children[0].text.logprob, length, longest, penalty)
            if self.finished[-1].score >= best:
                return []
        return children

    def _child(self, beam: Beam, candidate: Candidate) -> Child:
        """Return what a beam becomes with a token that is no end token."""
        child = Child(beam, _longer(beam, candidate))
        if beam.stream is not None:
            child.stream = beam.stream.fork()
            _, stop = child.stream.add(candidate.token_id)
            child.ends = stop is not None
        grammar = beam.slot.grammar
        if grammar is not None and not child.ends:
            child.grammar = grammar.fork()
            child.ends = child.grammar.is_complete(child.text.tokens)
        return child

    def _finish(self, text: Text, length: int) -> None:
        """Keep a text that has ended, if it is among the best."""
        value = score(text.logprob, length, self.slots[0].params.length_penalty)
        ended = Text(text.tokens, text.logprob, text.told, value)
        insort(self.finished, ended, key=lambda each: -each.score)
        del self.finished[self.width :]

    def _catch_up(self) -> list[Child]:
        """Return the beams of the next round where these are known."""
        parents = {beam.slot.tokens.tobytes(): beam for beam in self.live}
        length = len(self.live[0].slot.tokens) + 1
        children: dict[bytes, Child] = {}
        for text in self.behind:
            if length < len(text.tokens):
                text = Text(text.tokens[:length], 0.0)
            key = text.tokens.tobytes()
            if key not in children:
                children[key] = self._known(parents[text.tokens[:-1].tobytes()], text)
        if length == len(self.behind[0].tokens):
            self.behind = ()
        return list(children.values())

    def _known(self, parent: Beam, text: Text) -> Child:
        """Return a beam that was there before."""
        child = Child(parent, text)
        if parent.stream is not None:
            child.stream = parent.stream.fork()
            child.stream.add(text.tokens[-1])
        if parent.slot.grammar is not None:
            child.grammar = parent.slot.grammar.fork()
        return child

    def _stream(self) -> TextStream | None:
        """Return what looks for stop strings; None: there are none."""
        stream = self.beginning.stream()
        return stream if stream is not None and stream.may_stop else None

    def _read(self, stream: TextStream | None, tokens: array[int]) -> TextStream | None:
        """Let a stream read an output."""
        if stream is not None:
            for token_id in tokens[self.slots[0].num_prompt_tokens :]:
                stream.add(token_id)
        return stream


def _longer(beam: Beam, candidate: Candidate) -> Text:
    """Return what a beam is with one token more."""
    tokens = beam.slot.tokens[:]
    tokens.append(candidate.token_id)
    told = None if candidate.told is None else Told(candidate.told, beam.told)
    return Text(tokens, beam.logprob + candidate.logprob, told)


def rows_of(told: Told | None) -> tuple[RowLogprobs, ...] | None:
    """Return what is reported of an output, in the order of its tokens; None: nothing."""
    if told is None:
        return None
    rows: list[RowLogprobs] = []
    while told is not None:
        rows.append(told.row)
        told = told.before
    return tuple(reversed(rows))


def common_length(sequences: Iterable[array[int]]) -> int:
    """Return how many of the first tokens are the same in all of some sequences."""
    first, *others = sequences
    length = len(first)
    for other in others:
        length = min(length, len(other))
        if first[:length] != other[:length]:
            length = next(at for at in range(length) if first[at] != other[at])
    return length
