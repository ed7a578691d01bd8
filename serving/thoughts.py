"""Reasoning between tags, before an answer: where it ends, in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal

from onnxport.serving.split import Split, Stretch, joined
from onnxport.serving.text import longest_beginning

MOST_BREAKS: Final = 2  # ends of lines behind a closing tag that are a part of it
_SPACE: Final = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Enclosed:
    """A block.

    Attributes:
        opening: the text before it.
        first: what it begins with.
        closing: the text behind it; None: it goes on to the end.
    """

    opening: str
    first: str = ""
    closing: str | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """The reasoning before an answer: the texts that begin and end it.

    Attributes:
        opens, closes: each of them does so.
        is_open: whether it has begun before the text; otherwise the text may begin with it.
        around: what may begin and end the answer behind it; None: nothing.
        frames: texts that are no part of an answer, wherever in it they stand.
        is_past: whether there is none any more: the text is the answer, in its frames.
        ends_before: texts that end it, too, and begin the answer.
        ends_with: blocks that end it, and are the answer, where nothing but space follows the last
            of them: the thought was not closed.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    is_open: bool = False
    around: tuple[str, str] | None = None
    frames: tuple[str, ...] = ()
    is_past: bool = False
    ends_before: tuple[str, ...] = ()
    ends_with: tuple[Enclosed, ...] = ()


@dataclass(slots=True)
class ReasoningSplitter:
    """Split generated text into reasoning and the answer, incrementally.

    It loses nothing but the tags, space before an opening one, and ends of lines: those around the
    reasoning, up to two behind it, and those next to tags around the answer. A text may begin with
    a closing tag, where a model says so that it does not think, and a thought that is open with the
    opening tag, which some models write though the prompt has it or leaves it out. A tag that is
    not where it may be is text.

    Attributes:
        thought: what the text may begin with; None: with nothing.
    """

    thought: Thought | None
    _state: Literal["before", "within", "behind", "answer"] = field(init=False)
    _has_thought: bool = field(init=False)
    _may_open: bool = field(init=False)  # whether an open thought may begin with an opening tag
    _pending: str = field(default="", init=False)  # text that cannot be told apart yet
    _has_text: bool = field(default=False, init=False)  # whether the reasoning is more than breaks
    _num_breaks: int = field(default=0, init=False)  # behind the closing tag
    _ends_with: str | None = field(default=None, init=False)  # the tag that may end the answer
    _num_fed: int = field(default=0, init=False)  # characters
    _answer_start: int | None = field(default=None, init=False)
    _num_content: int = field(default=0, init=False)  # characters, counted where there are frames
    _framed: tuple[Stretch, ...] = field(default=(), init=False)  # of an answer that has frames
    _num_searched: int = field(default=0, init=False)  # characters, for what ends the reasoning
    # Where the first one of some blocks that are held begins, and the last one that was looked at,
    # by what opens them. Copies share it: it is replaced, not changed.
    _held_blocks: Mapping[str, tuple[int, int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._has_thought = self.thought is not None and self.thought.is_open
        self._may_open = self._has_thought
        may_think = self.thought is not None and not self.thought.is_past
        self._state = "within" if self._has_thought else "before" if may_think else "answer"

    @property
    def has_thought(self) -> bool:
        """Whether reasoning was begun."""
        return self._has_thought

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._state == "within"

    @property
    def is_answering(self) -> bool:
        """Whether what comes next is content."""
        return self._state == "answer"

    @property
    def is_framed(self) -> bool:
        """Whether text that is not told is no part of the answer: it may be space before it."""
        return self._has_thought

    @property
    def is_over(self) -> bool:
        """Whether all that comes is content, as it is."""
        return self._state == "answer" and self._ends_with is None and not self._frames

    @property
    def _frames(self) -> tuple[str, ...]:
        return () if self.thought is None else self.thought.frames

    @property
    def num_read(self) -> int:
        """How many characters of the text were told apart so far."""
        return self._num_fed - len(self._pending)

    @property
    def begun_close(self) -> str:
        """What of a closing tag the reasoning ends with, so far; empty: nothing."""
        if self.thought is None or not self.is_thinking:
            return ""
        held = longest_beginning(self._pending, self.thought.closes)
        return self._pending[len(self._pending) - held :]

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Where in the text the answer is: from one place on, or between its frames."""
        if self._frames:
            return self._framed
        start = self.num_read if self._answer_start is None else self._answer_start
        return (Stretch(0, start, None),)

    def feed(self, text: str) -> Split:
        """Take the next piece of text."""
        self._pending += text
        self._num_fed += len(text)
        return self._take(final=False)

    def finish(self) -> Split:
        """Take the end of the text; what was kept back belongs to where the text ends."""
        return self._take(final=True)

    def parts(self, text: str, *, is_last: bool) -> tuple[Split, ...]:
        """Take a piece of text, and the end if that is behind it; see `Splitter`."""
        return (self.take(text, is_last=is_last),)

    def take(self, text: str, *, is_last: bool) -> Split:
        """Take a piece of text, and the end if that is behind it."""
        split = self.feed(text)
        if not is_last:
            return split
        rest = self.finish()
        return Split(split.reasoning + rest.reasoning, split.content + rest.content)

    def _take(self, final: bool) -> Split:
        if self._state == "before":
            self._open(final)
        reasoning = self._reason(final) if self._state == "within" else ""
        if self._state == "behind":
            self._begin_answer(final)
        if self._state == "answer" and self._answer_start is None:
            self._answer_start = self.num_read
        content = self._answer(final) if self._state == "answer" else ""
        return Split(reasoning, content)

    def _open(self, final: bool) -> None:
        """Drop an opening tag; go on with the answer where there is none."""
        assert self.thought is not None
        begun = self._pending.lstrip()
        opens = self.thought.opens
        found = next((tag for tag in opens if begun.startswith(tag)), None)
        if found is not None:
            self._pending = begun[len(found) :]
            self._state, self._has_thought = "within", True
            return
        closes = self.thought.closes
        found = next((tag for tag in closes if begun.startswith(tag)), None)
        if found is not None:
            self._pending, self._state = begun[len(found) :], "behind"
        elif final or not any(tag.startswith(begun) for tag in opens + closes):
            self._state = "answer"

    def _is_opened(self, final: bool) -> bool:
        """Drop an opening tag of a thought that is open; returns whether that is certain."""
        assert self.thought is not None
        begun, opens = self._pending.lstrip(), self.thought.opens
        found = next((tag for tag in opens if begun.startswith(tag)), None)
        if found is not None:
            self._pending = begun[len(found) :]
        elif not final and any(tag.startswith(begun) for tag in opens):
            return False
        self._may_open = False
        return True

    def _reason(self, final: bool) -> str:
        """Take the reasoning, up to the first closing tag if there is one."""
        assert self.thought is not None
        if self._may_open and not self._is_opened(final):
            return ""
        if not self._has_text:
            self._pending = self._pending.lstrip("\n")
        ends = (*self.thought.closes, *self.thought.ends_before)
        searched = self._num_searched - self.num_read - max(map(len, ends), default=0)
        found = first_of(self._pending, ends, max(0, searched))
        self._num_searched = self._num_fed
        if found is not None:
            start, tag = found
            text = self._pending[:start].rstrip("\n")
            closes = tag in self.thought.closes
            self._pending = self._pending[start + len(tag) * closes :]
            self._state = "behind" if closes else "answer"
        elif (enclosed := self._enclosed_start(final)) is not None:
            text = self._pending[:enclosed].rstrip("\n")
            self._pending = self._pending[enclosed if final else len(text) :]
            self._state = "answer" if final else "within"
        elif final:
            text, self._pending = self._pending, ""
        else:
            opens = (each.opening for each in self.thought.ends_with)
            held = longest_beginning(self._pending, (*ends, *opens))
            text = self._pending[: len(self._pending) - held].rstrip("\n")
            self._pending = self._pending[len(text) :]
        self._has_text = self._has_text or bool(text)
        return text

    def _enclosed_start(self, final: bool) -> int | None:
        """Return where blocks begin that the thought ends with, or may end with; None: nowhere."""
        assert self.thought is not None
        starts = (self._start_of(each, final) for each in self.thought.ends_with)
        return min((each for each in starts if each is not None), default=None)

    def _start_of(self, block: Enclosed, final: bool) -> int | None:
        """Return where blocks of one kind begin; see `_enclosed_start`."""
        start = self._pending.find(block.opening)
        if block.closing is None or start < 0:
            return start if start >= 0 else None
        read, held = self.num_read, dict(self._held_blocks)
        first, last = held.pop(block.opening, (start + read, start + read))
        found = self._last_blocks(block, first - read, last - read, final)
        if found is not None:
            held[block.opening] = (found[0] + read, found[1] + read)
        self._held_blocks = held
        return None if found is None else found[0]

    def _last_blocks(
        self, block: Enclosed, start: int, at: int, final: bool
    ) -> tuple[int, int] | None:
        """Return where the blocks begin that nothing follows, and the last one of them.

        Args:
            block: of one kind, that is closed.
            start: where the first one of those that were looked at begins.
            at: where the last one of them does: each is read once.
            final: whether nothing follows what is pending.
        """
        assert self.thought is not None
        assert block.closing is not None
        text, tags = self._pending, (block.opening, *self.thought.closes)
        longest = max(map(len, tags))
        while at >= 0:
            behind = at + len(block.opening)
            inner = _behind_space(text, behind)
            if block.first.startswith(text[inner : inner + len(block.first)]):
                close = text.find(block.closing, inner)
                if close < 0:
                    return None if final else (start, at)
                behind = close + len(block.closing)
                following = _behind_space(text, behind)
                if text.startswith(block.opening, following):
                    at = following
                    continue
                rest = text[following : following + longest]
                if not rest or (not final and any(each.startswith(rest) for each in tags)):
                    return start, at
            start = at = text.find(block.opening, behind)
        return None

    def _begin_answer(self, final: bool) -> None:
        """Drop the ends of lines that belong to the closing tag, and a tag before the answer."""
        assert self.thought is not None
        self._drop_breaks()
        if self.thought.around is not None and self._ends_with is None:
            opens, closes = self.thought.around
            begun = self._pending.lstrip("\n")
            if begun.startswith(opens):
                self._pending, self._ends_with, self._num_breaks = begun[len(opens) :], closes, 0
                self._drop_breaks()
            elif opens.startswith(begun) and not final:
                return
        if self._pending or self._num_breaks == MOST_BREAKS:
            self._state = "answer"

    def _drop_breaks(self) -> None:
        while self._num_breaks < MOST_BREAKS and self._pending.startswith("\n"):
            self._pending = self._pending[1:]
            self._num_breaks += 1

    def _answer(self, final: bool) -> str:
        """Take the answer, without its frames or the tag that ends it."""
        if self._frames:
            return self._between_frames(final)
        text, self._pending = self._pending, ""
        tag = self._ends_with
        if tag is None:
            return text
        body, found, behind = text.rpartition(tag)
        if found and not behind.strip():
            kept = body.rstrip("\n")
        elif final:
            return text
        else:
            kept = text[: len(text) - longest_beginning(text, (tag,))].rstrip("\n")
        if not final:
            self._pending = text[len(kept) :]
        return kept

    def _between_frames(self, final: bool) -> str:
        """Take what of the answer is certain to be no frame, and remember where it is."""
        text, read = self._pending, self.num_read
        places = [found.span() for found in _any_of(self._frames).finditer(text)]
        behind = places[-1][1] if places else 0
        end = len(text) - (0 if final else longest_beginning(text[behind:], self._frames))
        told: list[str] = []
        placed, at = [*self._framed[-1:]], 0
        for start, behind in (*places, (end, end)):
            if start > at:
                told.append(text[at:start])
                stretch = Stretch(self._num_content, read + at, start - at)
                whole = joined(placed[-1], stretch) if placed else None
                placed[len(placed) - (whole is not None) :] = [whole or stretch]
                self._num_content += start - at
            at = behind
        if told:
            self._framed = (*self._framed[:-1], *placed)
        self._pending = text[end:]
        return "".join(told)


def first_of(text: str, tags: Sequence[str], begin: int = 0) -> tuple[int, str] | None:
    """Return where the first one of `tags` in a text is, and which; None: there is none.

    Of several that begin at one place it is the longest. What is before `begin` is not looked at.
    """
    found = [(start, tag) for tag in tags if (start := text.find(tag, begin)) >= 0]
    return min(found, key=lambda one: (one[0], -len(one[1]))) if found else None


@cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return what finds one of some texts, and the longest of those at one place."""
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))


def _behind_space(text: str, at: int) -> int:
    """Return the place behind the space at one."""
    found = _SPACE.match(text, at)
    assert found is not None, "no space is space enough"
    return found.end()
