"""Text in messages that each have a channel: the harmony format, which gpt-oss writes.

Behind the prompt's `<|start|>assistant` an answer is one message or several of them:

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary<|message|>what is told before calls<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The recipient may also stand before the channel, and the channel of a call may be analysis. Models
write other things, too: no channel at all, words that belong to no header, a mark twice. Source:
OpenAI's description of the format, the model's chat template, and what users of vLLM and llama.cpp
report that it writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from onnxport.serving.split import Split, Stretch, joined
from onnxport.serving.text import longest_beginning

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN, END, CALL, RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"
ENDS: Final = (END, CALL, RETURN)
MARKS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)  # special tokens, all of them
LONGEST: Final = max(map(len, MARKS))
ROLE = "assistant"
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
BREAK: Final = "\n\n"  # between the texts of two messages
MOST_HEADER: Final = 512  # characters; what is longer is no header
_MARK: Final = re.compile("|".join(map(re.escape, MARKS)))
HEADER_END: Final = re.compile("|".join(map(re.escape, (MESSAGE, START, *ENDS))))
_SIGN: Final = re.compile(rf'\\.|"|{_MARK.pattern}', re.DOTALL)  # that counts in JSON
_CHANNEL: Final = re.compile(rf"{re.escape(CHANNEL)}(?:{_MARK.pattern}|\W)*(\w*)")
_TO: Final = r"to=(?:functions\.[^<]*|[^\s<]*)"  # names may have spaces
_ROLE: Final = re.compile(rf"\s*(?:assistant)?\s*(?P<recipient>{_TO})?\s*")
_WORDS: Final = (ROLE, "to=")  # that a header may begin with
_OTHER: Final = re.compile(  # the header of a message that is not the assistant's
    rf"\s*(?!{'|'.join((*_WORDS, ANALYSIS, COMMENTARY, FINAL))})[^\s<]"
)
_PROPER: Final = re.compile(  # a header as it should be, or the beginning of one
    rf"\s*(?:assistant)?\s*(?:{_TO})?\s*(?:<\|channel\|>\w*\s*(?:{_TO})?\s*)?"
    r"(?:<\|constrain\|>)?\w*"
)


@dataclass(frozen=True, slots=True)
class Channels:
    """An answer in messages.

    Attributes:
        begun: the header of the message that the prompt ends within; empty: it ends before one.
    """

    begun: str = ""

    @property
    def is_final(self) -> bool:
        """Whether the text begins within the answer."""
        return bool(self.begun) and not self.is_thought

    @property
    def is_thought(self) -> bool:
        """Whether the text begins within reasoning."""
        return channel(self.begun).startswith(ANALYSIS)


def channel(header: str) -> str:
    """Return the channel that a header names first; empty: none.

    A commentary before the analysis is nothing: models write it by mistake now and then.
    """
    named = _CHANNEL.findall(header)
    if named and named[0] == COMMENTARY and ANALYSIS in named[1:]:
        return ANALYSIS
    return named[0] if named else ""


def called(header: str, names: Collection[str]) -> str | None:
    """Return the one of some functions that a header's message calls; None: it calls none."""
    if not names or "to=" not in header:
        return None
    found = _recipient(tuple(names)).search(header)
    return None if found is None else found[1]


@lru_cache(64)
def _recipient(names: tuple[str, ...]) -> re.Pattern[str]:
    among = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?<![^\s>])to=(?:functions\.)?({among})(?=[\s<]|$)")


@dataclass(frozen=True, slots=True)
class ChannelFormat:
    """How gpt-oss writes its reasoning.

    Attributes:
        tags: texts that are special tokens and have to be text; none are.
        marks: special tokens that have to be in the text of a chat.
        answers: texts that begin the answer within a thought; none do.
        efforts: that the model knows.
    """

    tags: tuple[str, ...] = ()
    marks: tuple[str, ...] = MARKS
    answers: tuple[str, ...] = ()
    efforts: tuple[str, ...] | None = ("low", "medium", "high")

    def __str__(self) -> str:
        """Say where reasoning is."""
        return f"in messages of the channel {ANALYSIS}"

    def is_in(self, source: str) -> bool:
        """Whether a chat template speaks of it."""
        return f"{CHANNEL}{ANALYSIS}{MESSAGE}" in source

    def thought(self, prompt: str, continued: str | None = None) -> Channels:
        """Return what an answer begins with; see `ReasoningFormat.thought`."""
        if continued is not None:
            prompt = prompt.removesuffix(continued)
        header, message, body = prompt.rpartition(START)[2].partition(MESSAGE)
        is_open = bool(message) and not any(mark in body for mark in ENDS)
        return Channels(header.strip().removeprefix(ROLE) + message if is_open else "")


Kind = Literal["thought", "answer", "call", "other"]


class ChannelSplitter:
    """Split messages into reasoning and the answer, incrementally.

    Bodies alone are told, those of one kind with `BREAK` between; a text without a header is the
    answer. Messages that call a function are content with their header, which the reader of calls
    takes; what it makes of them decides what is parted. A mark that is out of place is nothing; so
    is a header that leads to no message, unless there is nothing else, and a message of another
    role, such as what a function would give: OpenAI's parser reads it as a message of its own, and
    it is no part of the answer.
    """

    def __init__(self, channels: Channels, functions: Collection[str] = ()) -> None:
        """Begin a text.

        Args:
            channels: what it begins with.
            functions: whose calls are read.
        """
        self._functions = functions
        self._pending = ""  # text that cannot be told apart yet
        self._in_header = True
        self._is_marked = False  # whether the header has a mark
        self._has_role = False  # whether the header begins with one
        self._kind: Kind = "answer"  # of the body
        self._told: set[Kind] = set()
        self._is_new = False  # whether nothing of the message is told yet
        self._is_blank = False  # whether nothing but space was in the body
        self._has_begun = False  # whether there was a message
        self._in_quotes: bool | None = None  # within a text of JSON; None: the body is none so far
        self._has_thought = False
        self._num_taken = -len(channels.begun)  # characters of the text
        self._num_content = 0  # characters
        self._stretches: list[Stretch] = []
        self.parts(channels.begun, is_last=False)

    @property
    def has_thought(self) -> bool:
        """Whether reasoning was begun."""
        return self._has_thought

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is reasoning."""
        return not self._in_header and self._kind == "thought"

    @property
    def is_answering(self) -> bool:
        """Whether what comes next is content."""
        return not self._in_header and self._kind in ("answer", "call")

    @property
    def is_framed(self) -> bool:
        """Whether text that is not told is no part of the answer."""
        return True

    @property
    def is_over(self) -> bool:
        """Whether all that comes is content, as it is."""
        return False

    @property
    def num_read(self) -> int:
        """How many characters of the text were told apart so far."""
        return self._num_taken - len(self._pending)

    @property
    def stretches(self) -> Sequence[Stretch]:
        """Where in the text the answer is, so far: bodies of its messages and of calls."""
        return self._stretches

    def parts(self, text: str, *, is_last: bool) -> tuple[Split, ...]:
        """Take a piece of text, and the end if that is behind it; return what it gave, in order."""
        self._pending += text
        self._num_taken += len(text)
        splits: list[Split] = []
        while self._pending and (
            self._read_header(is_last, splits)
            if self._in_header
            else self._read_body(is_last, splits)
        ):
            pass
        return tuple(splits)

    def _read_header(self, is_last: bool, splits: list[Split]) -> bool:
        """Take a header; returns whether more can be told apart."""
        if not self._is_marked:
            begins = self._begins_header(is_last)
            if begins is None:
                return False
            if not begins:
                self._begin_body("answer")
                return True
            self._is_marked = True
        found = HEADER_END.search(self._pending, 0, MOST_HEADER)
        if found is None:
            is_long = len(self._pending) >= MOST_HEADER
            if is_last and not is_long and (self._told or _PROPER.fullmatch(self._pending)):
                self._pending = ""
            elif is_last or is_long:  # it is no header
                begun, rest = self._pending[:MOST_HEADER], self._pending[MOST_HEADER:]
                self._pending = _MARK.sub("", begun) + rest
                self._begin_body("answer")
            return not self._in_header
        header, self._pending = self._pending[: found.start()], self._pending[found.end() :]
        if found[0] == MESSAGE:
            self._begin_message(header, splits)
        else:  # it leads to nothing
            self._is_marked = self._has_role = found[0] == START
        return True

    def _begins_header(self, is_last: bool) -> bool | None:
        """Whether a header stands here, and not text without one; None: what follows decides."""
        role = _ROLE.match(self._pending)
        assert role is not None, "it matches nothing, too"
        rest = self._pending[role.end() :]
        if rest.startswith(MARKS):
            return True
        if not is_last:
            waits = any(one.startswith(rest) for one in (*MARKS, *_WORDS))
            return None if waits else False
        if not rest and self._has_begun:
            self._pending = ""
        return bool(role["recipient"]) and not rest

    def _begin_message(self, header: str, splits: list[Split]) -> None:
        """Begin the message of a header."""
        if self._has_role and _OTHER.match(header):
            self._begin_body("other")
        elif called(header, self._functions):
            self._begin_body("call")
            self._told = (self._told - {"answer"}) | {"call"}  # which it is parted from
            own = header.strip().removeprefix(ROLE).strip()
            self._add_content(f"{START}{ROLE} {own}{MESSAGE}", splits)
        elif channel(header).startswith(ANALYSIS):
            self._begin_body("thought")
            self._has_thought = True
        else:
            self._begin_body("answer")

    def _begin_body(self, kind: Kind) -> None:
        self._kind, self._in_header, self._is_marked = kind, False, False
        self._is_new = self._is_blank = self._has_begun = True
        self._in_quotes = None

    def _read_body(self, is_last: bool, splits: list[Split]) -> bool:
        """Take the text of a message; returns whether more can be told apart."""
        found = self._next_mark()
        if found is None:
            held = 0 if is_last else self._num_held()
            end = len(self._pending) - held
            self._tell(self._pending[:end], splits)
            self._pending = self._pending[end:]
            return False
        self._tell(self._pending[: found.start()], splits)
        self._pending = self._pending[found.end() :]
        if found[0] in (MESSAGE, CONSTRAIN):
            return True
        if self._kind == "call":
            self._add_content(END, splits)
        self._in_header, self._is_marked = True, found[0] in (START, CHANNEL)
        self._has_role = found[0] == START
        if found[0] == CHANNEL:
            self._pending = CHANNEL + self._pending
        return True

    def _next_mark(self) -> re.Match[str] | None:
        """Return the next mark in a body; letters of one in a text of JSON are none."""
        if self._kind == "call" and self._is_blank and self._pending.lstrip()[:1] == "{":
            self._in_quotes = False
        if self._in_quotes is None:
            return _MARK.search(self._pending)
        at = 0
        while sign := _SIGN.search(self._pending, at):
            at = sign.end()
            if sign[0] == '"':
                self._in_quotes = not self._in_quotes
            elif not self._in_quotes:
                if sign[0] in MARKS:
                    return sign
                at = sign.start() + 1  # a backslash means nothing here
        return None

    def _num_held(self) -> int:
        """Return how many characters at the end of a body may be a part of a sign."""
        if self._in_quotes and self._pending.endswith("\\"):
            return (len(self._pending) - len(self._pending.rstrip("\\"))) % 2
        if "<" not in self._pending[-LONGEST:]:
            return 0
        return longest_beginning(self._pending, MARKS)

    def _tell(self, text: str, splits: list[Split]) -> None:
        """Give text of a body, which the pending text begins with."""
        if not text or self._kind == "other":
            return
        before = ""
        if self._is_new and self._kind != "call" and self._kind in self._told:
            before = BREAK
        self._is_new, self._is_blank = False, self._is_blank and not text.strip()
        self._told.add(self._kind)
        if self._kind == "thought":
            splits.append(Split(reasoning=before + text))
            return
        self._place(Stretch(self._num_content + len(before), self.num_read, len(text)))
        self._add_content(before + text, splits)

    def _add_content(self, text: str, splits: list[Split]) -> None:
        self._num_content += len(text)
        splits.append(Split(content=text))

    def _place(self, stretch: Stretch) -> None:
        """Remember where content is; what goes on is joined to what it goes on from."""
        whole = joined(self._stretches[-1], stretch) if self._stretches else None
        if whole is None:
            self._stretches.append(stretch)
        else:
            self._stretches[-1] = whole
