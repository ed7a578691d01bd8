"""Reasoning in generated text: what begins and ends it, and how it is told from the answer.

Models that think write their thoughts before the answer, between tags. Some write the opening tag
themselves; with others the chat template has written it, so that the text begins within the
thoughts, or has opened and closed them, so that there are none. Other models write messages, each
in a channel (`serving/channels.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from onnxport.serving.channels import ChannelFormat, Channels, ChannelSplitter
from onnxport.serving.split import Split, Stretch
from onnxport.serving.thoughts import ReasoningSplitter, Thought

# What messages call it: DeepSeek's API and llama.cpp; vLLM today.
REASONING_NAMES: Final = ("reasoning_content", "reasoning")
_MOST_BETWEEN: Final = 80  # characters, of words about where the answer is


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes its reasoning.

    Attributes:
        opens, closes, around, frames: see `Thought`.
        is_implied: whether an answer begins with it where the prompt says nothing about it.
        tokens: special tokens that tags or frames are made of, where these are not tokens.
        past: further texts that a prompt ends with where there is no reasoning.
        signs: what chat templates speak of, one of it; none: its tags.
        marks: special tokens that have to be in the text of a chat.
        answers: texts that begin the answer, which may end a thought that was not closed.
        efforts: that the model knows; None: what its chat template makes of them.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    is_implied: bool = False
    around: tuple[str, str] | None = None
    frames: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    past: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    efforts: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """Say where it is."""
        return f"between {' or '.join(self.opens)} and {' or '.join(self.closes)}"

    @property
    def tags(self) -> tuple[str, ...]:
        """What begins and ends it, and the answer behind it; special tokens that are to be text."""
        texts = self.opens + self.closes + (self.around or ()) + self.frames + self.tokens
        return tuple(text for text in texts if text)

    def is_in(self, source: str) -> bool:
        """Whether a chat template speaks of it."""
        if self.around is not None and self.around[0] and not self._is_followed(source):
            return False
        return any(sign in source for sign in self.signs or self.opens + self.closes)

    def _is_followed(self, source: str) -> bool:
        """Whether a chat template speaks of the tag before the answer right behind one of these."""
        assert self.around is not None
        closes = "|".join(map(re.escape, self.closes))
        answer = rf"(?:{closes})[^{{}}]{{0,{_MOST_BETWEEN}}}{re.escape(self.around[0])}"
        return re.search(answer, source) is not None

    def thought(self, prompt: str, continued: str | None = None) -> Thought | None:
        """Return what an answer may begin with; None: nothing of it is reasoning.

        Args:
            prompt: that is answered.
            continued: the text of the message that goes on, where the prompt ends within one.
        """
        end = prompt.rstrip()
        if continued is not None:
            opened = max(continued.rfind(tag) for tag in self.opens)
            is_open = opened > max(continued.rfind(tag) for tag in self.closes)
            is_closed = not is_open
        else:
            is_open = self.is_implied or end.endswith(self.opens)
            is_closed = end.endswith(self.closes + self.past)
        if is_closed and not self.frames:
            return None
        is_open = is_open and not is_closed
        return Thought(
            self.opens, self.closes, is_open, self.around, self.frames, is_past=is_closed
        )


AnyFormat = ReasoningFormat | ChannelFormat


class Splitter(Protocol):
    """Splits generated text into reasoning and the answer, incrementally."""

    @property
    def has_thought(self) -> bool:
        """Whether reasoning was begun."""
        ...

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        ...

    @property
    def is_answering(self) -> bool:
        """Whether what comes next is content."""
        ...

    @property
    def is_framed(self) -> bool:
        """Whether text that is not told is no part of the answer."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether all that comes is content, as it is."""
        ...

    @property
    def num_read(self) -> int:
        """How many characters of the text were told apart so far."""
        ...

    @property
    def stretches(self) -> Sequence[Stretch]:
        """Where in the text the answer is, so far, in order."""
        ...

    def parts(self, text: str, *, is_last: bool) -> tuple[Split, ...]:
        """Take a piece of text, and the end if that is behind it; return what it gave, in order."""
        ...


def splitter(thought: Thought | Channels | None, functions: Collection[str] = ()) -> Splitter:
    """Return what splits a text.

    Args:
        thought: what it may begin with; None: nothing of it is reasoning.
        functions: whose calls are read from the answer, where they are messages of their own.
    """
    if isinstance(thought, Channels):
        return ChannelSplitter(thought, functions)
    return ReasoningSplitter(thought)
