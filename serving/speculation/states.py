"""Hidden states that wait until a draft head reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.request import Request
from onnxport.serving.speculation.growing import CachedSequence

MOST_WAITING = 512  # states of a request that wait, or up to twice as many for a while
MOST_STEPS = 64  # whose states are kept together
MOST_STEPS_BYTES = 4 << 20  # of these, but for a single step's

States = NDArray[np.float32]  # [num_tokens, features]


@dataclass(slots=True)
class Count:
    """Tokens whose states wait, of all requests."""

    tokens: int = 0


@dataclass(slots=True)
class HeadSequence(CachedSequence):
    """What a head knows of a request.

    A token goes to the head with the state of the one before. So the cache begins with token
    `first`, at least 1, and the states that wait are of the tokens before those to compute. What
    the head itself made of a token, `made`, goes with the next one that it guesses.
    """

    total: Count = field(default_factory=Count)
    num_waiting: int = 0
    made: NDArray[np.float32] | None = None  # of the last token computed, [hidden]
    _waiting: deque[States] = field(default_factory=deque)

    @property
    def end(self) -> int:
        """The first token whose state is not known."""
        return self.first - 1 + self.num_computed + self.num_waiting

    def add(self, first: int, states: States) -> None:
        """Keep states that are told: of token `first` and those behind it.

        Those that are known already are skipped. Where some are missing ahead of them, or too many
        wait, the cache begins anew, behind these.
        """
        self.guessed.clear()
        known = self.end - first
        if known < 0:
            self.restart(first)
            known = 0
        new = states[known:]
        if len(new) > MOST_WAITING:
            self.restart(first + len(states) - MOST_WAITING)
            new = new[-MOST_WAITING:]
        if len(new):
            self._waiting.append(new.copy())
            self._count(len(new))
        if self.num_waiting > 2 * MOST_WAITING:
            end = self.end
            self._drop(self.num_waiting - MOST_WAITING)
            self.first, self.num_computed = end - MOST_WAITING + 1, 0

    def restart(self, first: int) -> None:
        """Forget all but the blocks: the next state is of token `first`."""
        self._waiting.clear()
        self._count(-self.num_waiting)
        self.first, self.num_computed = first + 1, 0
        self.guessed.clear()

    def begin_anew(self) -> None:
        """Forget what is computed: the cache begins with the states that wait."""
        self.first, self.num_computed = self.end - self.num_waiting + 1, 0
        self.guessed.clear()

    def fork(self) -> HeadSequence:
        """What is known of a request that has the same tokens: what waits."""
        first = self.end - self.num_waiting + 1
        fork = HeadSequence(first, total=self.total)
        fork._waiting.extend(self._waiting)
        fork._count(self.num_waiting)
        return fork

    def read(self, into: States) -> None:
        """Write the first states that wait, of as many tokens as `into` has."""
        done = 0
        for states in self._waiting:
            part = states[: len(into) - done]
            into[done : done + len(part)] = part
            done += len(part)
            if done == len(into):
                return
        raise AssertionError(f"{len(into)} states were asked for and {done} wait")

    def note_computed(self, num_tokens: int) -> None:
        """See `CachedSequence.note_computed`; the states have been read."""
        self.num_computed += num_tokens
        self._drop(num_tokens)

    def _drop(self, num_tokens: int) -> None:
        """Let go of the first states that wait."""
        self._count(-num_tokens)
        while num_tokens:
            states = self._waiting.popleft()
            if len(states) > num_tokens:
                self._waiting.appendleft(states[num_tokens:])
            num_tokens -= min(num_tokens, len(states))

    def _count(self, num_tokens: int) -> None:
        self.num_waiting += num_tokens
        self.total.tokens += num_tokens


class DecodeStates:
    """States of steps in which the same requests decode, each one token, kept step by step.

    So a step costs one copy, however many requests it has, and each request its part of every
    `MOST_STEPS` steps.
    """

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._requests: tuple[Request, ...] = ()
        self._firsts: Sequence[int] = ()
        self._num_steps = 0
        self._room = np.empty((0, 0, 0), np.float32)  # [steps, requests, features]

    def add(self, requests: tuple[Request, ...], firsts: Sequence[int], states: States) -> bool:
        """Keep the states of a step, if it follows those that are kept and there is room.

        Args:
            requests: the same tuple as that of the steps before.
            firsts: the number of each one's token.
            states: float32 [len(requests), features].

        Returns:
            Whether they are kept. If not, `take` all, and `begin` anew.
        """
        number = self._num_steps
        if requests is not self._requests or number == len(self._room):
            return False
        if firsts[0] != self._firsts[0] + number:
            return False
        self._room[number] = states
        self._num_steps = number + 1
        return True

    def begin(self, requests: tuple[Request, ...], firsts: Sequence[int], features: int) -> None:
        """Keep steps of these requests from now on; nothing may be left that is kept."""
        assert not self._num_steps, "what is kept would be lost"
        self._requests, self._firsts = requests, firsts
        shape = len(requests), features
        if self._room.shape[1:] != shape:
            step_bytes = len(requests) * features * self._room.itemsize
            steps = max(1, min(MOST_STEPS, MOST_STEPS_BYTES // step_bytes))
            self._room = np.empty((steps, *shape), np.float32)

    def take(self) -> Iterator[tuple[Request, int, States]]:
        """Yield each request, the number of its first token that is kept, and its states.

        They are of [tokens, features], and as they are until `add`. Nothing is kept then.
        """
        requests, firsts, states = self._requests, self._firsts, self._room[: self._num_steps]
        self._requests, self._firsts, self._num_steps = (), (), 0
        if len(states):
            for row, request in enumerate(requests):
                yield request, firsts[row], states[:, row]
