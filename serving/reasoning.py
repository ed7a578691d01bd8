"""Reasoning in generated text: what begins and ends it, and how it is told from the answer.

Models that think write their thoughts before the answer, between tags. Some write the opening tag
themselves; with others the chat template has written it, so that the text begins within the
thoughts, or has opened and closed them, so that there are none. Other models write messages, each
in a channel (`serving/channels.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from onnxport.errors import RequestError
from onnxport.serving.channels import ChannelFormat, Channels, ChannelSplitter
from onnxport.serving.split import Split, Stretch
from onnxport.serving.text import longest_beginning

AUTO: Final = "auto"
NONE: Final = "none"
# What messages call it: DeepSeek's API and llama.cpp; vLLM today.
REASONING_NAMES: Final = ("reasoning_content", "reasoning")
MOST_BREAKS: Final = 2  # ends of lines behind a closing tag that are a part of it


@dataclass(frozen=True, slots=True)
class Thought:
    """The reasoning before an answer: the texts that begin and end it.

    Attributes:
        opens, closes: each of them does so.
        is_open: whether it has begun before the text; otherwise the text may begin with it.
        around: what may begin and end the answer behind it; None: nothing.
        ends_before: texts that end it, too, and begin the answer.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    is_open: bool = False
    around: tuple[str, str] | None = None
    ends_before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models writes its reasoning.

    Attributes:
        opens, closes, around: see `Thought`.
        is_implied: whether an answer begins with it where the prompt says nothing about it.
        marks: special tokens that have to be in the text of a chat.
        efforts: that the model knows; None: what its chat template makes of them.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    is_implied: bool = False
    around: tuple[str, str] | None = None
    marks: tuple[str, ...] = ()
    efforts: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """Say where it is."""
        return f"between {' or '.join(self.opens)} and {' or '.join(self.closes)}"

    @property
    def tags(self) -> tuple[str, ...]:
        """What begins and ends it, and the answer behind it; special tokens that are to be text."""
        return self.opens + self.closes + (self.around or ())

    def is_in(self, source: str) -> bool:
        """Whether a chat template speaks of it."""
        has_answer = self.around is None or self.around[0] in source
        return has_answer and any(tag in source for tag in self.opens + self.closes)

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
            is_closed = end.endswith(self.closes)
        return None if is_closed else Thought(self.opens, self.closes, is_open, self.around)


_THINK: Final = ReasoningFormat(("<think>",), ("</think>",))
_MINIMAX: Final = ReasoningFormat(("<mm:think>",), ("</mm:think>",))
_SEED: Final = ReasoningFormat(("<seed:think>",), ("</seed:think>",))
_GRANITE: Final = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
_RESPONSE: Final = ReasoningFormat(  # ERNIE 4.5's, Granite 3.3's
    _THINK.opens, _THINK.closes, around=("<response>", "</response>")
)
# By vLLM's names. DeepSeek-R1 thinks always: a template that does not open its thoughts leaves the
# tag to the model, which may leave it out.
FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "qwen3": _THINK,
    "deepseek_r1": ReasoningFormat(_THINK.opens, _THINK.closes, is_implied=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "ernie45": _RESPONSE,
    "minimax_m3": _MINIMAX,
    "seed_oss": _SEED,
    "granite": _GRANITE,
}
AnyFormat = ReasoningFormat | ChannelFormat
_ALL: Final[Mapping[str, AnyFormat]] = {**FORMATS, "openai_gptoss": ChannelFormat()}
# Where it is to be recognized, in this order.
_TRIED: Final = ("openai_gptoss", "minimax_m3", "seed_oss", "granite", "ernie45", "qwen3")


def reasoning_format(name: str, templates: Iterable[str]) -> AnyFormat | None:
    """Return the format of a name; None: reasoning is not told from the answer.

    Args:
        name: vLLM's of one, "none", or "auto": that which the chat templates speak of.
        templates: the model's.

    Raises:
        RequestError: there is no such name.
    """
    if name == NONE:
        return None
    if name == AUTO:
        sources = list(templates)
        tried = (_ALL[each] for each in _TRIED)
        return next((one for one in tried if any(map(one.is_in, sources))), None)
    if name not in _ALL:
        known = ", ".join((AUTO, NONE, *_ALL))
        raise RequestError(f"there is no reasoning parser {name!r}; use one of {known}")
    return _ALL[name]


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


@dataclass(slots=True)
class ReasoningSplitter:
    """Split generated text into reasoning and the answer, incrementally.

    It loses nothing but the tags, space before the first one, and ends of lines: those around the
    reasoning, up to two behind it, and those next to tags around the answer. A tag that is not
    where it may be is text.

    Attributes:
        thought: what the text may begin with; None: with nothing.
    """

    thought: Thought | None
    _state: Literal["before", "within", "behind", "answer"] = field(init=False)
    _has_thought: bool = field(init=False)
    _pending: str = field(default="", init=False)  # text that cannot be told apart yet
    _has_text: bool = field(default=False, init=False)  # whether the reasoning is more than breaks
    _num_breaks: int = field(default=0, init=False)  # behind the closing tag
    _ends_with: str | None = field(default=None, init=False)  # the tag that may end the answer
    _num_fed: int = field(default=0, init=False)  # characters
    _answer_start: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._has_thought = self.thought is not None and self.thought.is_open
        self._state = "within" if self._has_thought else "before" if self.thought else "answer"

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
        return self._state == "answer" and self._ends_with is None

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
        """Where in the text the answer is: from one place on."""
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
        """Drop an opening tag; go on with the answer where there is none.

        A closing tag says that nothing was thought, as MiniMax M3's does ahead of such an answer.
        """
        assert self.thought is not None
        begun = self._pending.lstrip()
        opens, closes = self.thought.opens, self.thought.closes
        found = next((tag for tag in (*opens, *closes) if begun.startswith(tag)), None)
        if found is not None:
            self._pending = begun[len(found) :]
            self._has_thought = found in opens
            self._state = "within" if self._has_thought else "behind"
        elif final or not any(tag.startswith(begun) for tag in (*opens, *closes)):
            self._state = "answer"

    def _reason(self, final: bool) -> str:
        """Take the reasoning, up to the first closing tag if there is one."""
        assert self.thought is not None
        if not self._has_text:
            self._pending = self._pending.lstrip("\n")
        ends = (*self.thought.closes, *self.thought.ends_before)
        found = first_of(self._pending, ends)
        if found is not None:
            start, tag = found
            text = self._pending[:start].rstrip("\n")
            closes = tag in self.thought.closes
            self._pending = self._pending[start + len(tag) * closes :]
            self._state = "behind" if closes else "answer"
        elif final:
            text, self._pending = self._pending, ""
        else:
            held = longest_beginning(self._pending, ends)
            text = self._pending[: len(self._pending) - held].rstrip("\n")
            self._pending = self._pending[len(text) :]
        self._has_text = self._has_text or bool(text)
        return text

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
        """Take the answer, without the tag that ends it."""
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


def first_of(text: str, tags: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first one of `tags` in a text is, and which; None: there is none."""
    found = [(start, tag) for tag in tags if (start := text.find(tag)) >= 0]
    return min(found) if found else None
