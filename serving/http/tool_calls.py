"""Find tool calls in generated text, in the format of the model.

The parser takes text in any pieces, gives content as early as it can, and loses nothing: what is no
call of an offered function stays content.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from onnxport.serving.http.tool_formats.base import Block, Functions, ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.cursor import (
    Awaited,
    Incomplete,
    hidden_places,
    longest_partial,
    without,
)
from onnxport.serving.http.tool_formats.hermes import HERMES

# Blocks that are none and were all read up to one place, be it the end of all: openings within one
# another would else each have all behind them read.
MOST_TRIED = 20


@dataclass(frozen=True, slots=True)
class Parsed:
    """What one piece of text gave: content and calls, in their order.

    Attributes:
        parts: all of them.
        ends: where each one ends, in characters of the text from its start on.
    """

    parts: tuple[str | ParsedCall, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def content(self) -> str:
        """The content alone."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> tuple[ParsedCall, ...]:
        """The calls alone."""
        return tuple(part for part in self.parts if isinstance(part, ParsedCall))


@dataclass(slots=True)
class ToolCallParser:
    """Split generated text into content and tool calls, incrementally.

    Attributes:
        functions: that were offered, and their parameters; a call of another one stays content.
        format: how the model writes calls.
        hidden: special tokens that stand in the text for this parser alone; content has none.
    """

    functions: Functions
    format: ToolFormat = HERMES
    hidden: Collection[str] = ()
    _pending: str = field(default="", init=False)  # text that cannot be told apart yet
    _begun: bool = field(default=False, init=False)  # whether there was anything but space
    _found: bool = field(default=False, init=False)
    _behind: bool = field(default=False, init=False)  # a call, and nothing but space since
    _is_parted: bool = field(default=False, init=False)  # from content before, by what is not told
    _has_content: bool = field(default=False, init=False)  # that was told
    _space: str = field(default="", init=False)  # at the end of the content; not told yet
    _num_taken: int = field(default=0, init=False)  # characters before the pending text
    _content_end: int = field(default=0, init=False)  # behind the last one that is not in _space
    _ids: set[str] = field(default_factory=set, init=False)  # that the model gave to calls
    _awaited: Awaited | None = field(default=None, init=False)  # before a block can be read
    _seen: int = field(default=0, init=False)  # characters that were read for blocks that are none
    _num_within: int = field(default=0, init=False)  # of these blocks, within the first of them

    def feed(self, text: str) -> Parsed:
        """Take the next piece of text."""
        self._pending += text
        if self._awaited is not None and not self._awaited.has_come(text):
            return Parsed()
        return self._take(final=False)

    def finish(self) -> Parsed:
        """Take the end of the text; a block that was left open counts if it is complete."""
        return self._take(final=True)

    def settle(self) -> Parsed:
        """Take what was held as `finish` does, where a text follows that is parted from it."""
        parsed = self._take(final=True)
        self._space = ""
        return parsed

    def take(self, text: str, *, is_last: bool) -> Parsed:
        """Take a piece of text, and the end if that is behind it."""
        parsed = self.feed(text)
        if not is_last:
            return parsed
        rest = self.finish()
        return Parsed(parsed.parts + rest.parts, parsed.ends + rest.ends)

    def _take(self, final: bool) -> Parsed:
        """Consume as much of the pending text as can be told apart."""
        parts: list[tuple[str | ParsedCall, int]] = []
        self._awaited = None
        num_tried = 0
        while self._pending:
            start = self._opening()
            if start < 0 or num_tried == MOST_TRIED:
                parts.append(self._take_content(final))
                break
            block = self._read(start, final)
            if block is None:
                parts.append(self._drop(start))
                break
            if block.calls:
                parts.append(self._drop(start))
                self._space = ""  # before a call
                self._skip(block.end - start)
                parts += [(self._with_own_id(call), self._num_taken) for call in block.calls]
                self._found = self._begun = self._behind = True
                continue
            num_tried += final
            end = self._content_to(start, block)
            if not block.is_told:
                parts.append(self._drop(start))
                self._skip(block.end - start)
                end -= block.end
            parts.append(self._drop(end))
        if final and not self._found:
            parts.append((self._space, self._num_taken))
        told = [(part, end) for part, end in parts if part]
        return Parsed(tuple(part for part, _ in told), tuple(end for _, end in told))

    def _content_to(self, start: int, block: Block) -> int:
        """Return where the next block is looked for behind one that is content, at some place."""
        if self._num_taken + start >= self._seen:
            self._num_within = 0
        if block.seen > block.end:
            self._seen = max(self._seen, self._num_taken + block.seen)
            self._num_within += 1
        if self._num_within < MOST_TRIED:
            return block.end
        return max(block.end, self._seen - self._num_taken)

    def _with_own_id(self, call: ParsedCall) -> ParsedCall:
        """Return a call without the id that the model gave it, if an earlier one has the same."""
        if call.id is None:
            return call
        is_new = call.id not in self._ids
        self._ids.add(call.id)
        return call if is_new else replace(call, id=None)

    def _opening(self) -> int:
        """Return where the next block may begin; -1: nowhere yet."""
        if begins := self._begins():
            rest = self._pending.lstrip()
            if rest.startswith(begins):
                return len(self._pending) - len(rest)
        found = (self._pending.find(marker) for marker in self.format.markers)
        return min((each for each in found if each >= 0), default=-1)

    def _begins(self) -> tuple[str, ...]:
        """Return what a block may begin with here, without a marker."""
        if not self._begun:
            return (*self.format.begins(self.functions), *self.format.headers)
        return self.format.goes_on if self._behind else ()

    def _read(self, start: int, final: bool) -> Block | None:
        """Return the block at a place; None: it is not all there."""
        try:
            return self.format.read(self._pending, start, final, self.functions)
        except Incomplete as error:
            self._awaited = error.awaited
            return None

    def _take_content(self, final: bool) -> tuple[str, int]:
        """Take the text before anything that may be the start of a block, as `_drop` does."""
        if final:
            return self._drop(len(self._pending))
        rest = self._pending.lstrip()
        if any(each.startswith(rest) for each in self._begins()):
            return self._drop(0)
        held = longest_partial(self._pending, (*self.format.markers, *self.hidden))
        return self._drop(len(self._pending) - held)

    def _skip(self, num_characters: int) -> None:
        """Advance behind a block that is no content."""
        self._pending = self._pending[num_characters:]
        self._num_taken += num_characters
        self._is_parted = True

    def _drop(self, end: int) -> tuple[str, int]:
        """Advance to `end`; space at the end of content waits for more.

        Returns:
            What is content, and where it ends in the whole text.
        """
        taken, self._pending = self._pending[:end], self._pending[end:]
        if taken.strip():
            self._begun, self._behind = True, False
        if last := self._last_of(taken):
            self._content_end = self._num_taken + last
        self._num_taken += end
        taken = without(taken, hidden_places(taken, self.hidden))
        if taken and self._is_parted:
            self._is_parted = False
            self._space += self.format.between if self._has_content else ""
        text = self._space + taken
        content = text.rstrip()
        self._has_content = self._has_content or bool(content)
        self._space = text[len(content) :]
        return content, self._content_end

    def _last_of(self, text: str) -> int:
        """Return where a text ends without space and hidden tokens at its end."""
        kept = text.rstrip()
        while found := next((each for each in self.hidden if kept.endswith(each)), None):
            kept = kept.removesuffix(found).rstrip()
        return len(kept)
