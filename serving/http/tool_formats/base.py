"""What a format of tool calls is: how it is read, how it is written, and how it is recognized."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from onnxport.serving.thoughts import Enclosed

# Places in `Written.call`.
NAME, QUOTED, ID, ARGUMENTS = "{name}", "{quoted}", "{id}", "{arguments}"
BREAK = "{break}"  # the end of a line that models may leave out, in any text of `Written`
JSON_CALL = f'{{"name": {QUOTED}, "arguments": {ARGUMENTS}}}'

Functions = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of its parameters


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call of a function."""

    name: str
    arguments: str  # JSON text
    id: str | None = None  # that the model gave it


@dataclass(frozen=True, slots=True)
class Block:
    """What a part of a text was found to be.

    Attributes:
        end: where it ends in the text.
        calls: in it; none: it is content like any other, and what is behind it is looked at anew.
        is_told: whether it is content where there are no calls; if not, it is nothing.
        seen: the place up to which the text was read to find no calls, where that is behind `end`.
    """

    end: int
    calls: tuple[ParsedCall, ...] = ()
    is_told: bool = True
    seen: int = 0


class Reader(Protocol):
    """Reads a block; what it says of a text it says of every longer one that begins so."""

    def __call__(self, text: str, start: int, final: bool, functions: Functions) -> Block:
        """Return the block that may begin at `start`.

        Args:
            text: what was generated so far.
            start: where a marker stands, or a character that a block may begin with.
            final: whether nothing follows `text`.
            functions: that were offered; a block with a call of another one has none.

        Raises:
            Incomplete: what follows `text` decides.
        """
        ...


@dataclass(frozen=True, slots=True)
class Written:
    """How calls are written where their form is enforced.

    A text is one block or several of them, a block one call or several.

    Attributes:
        opening, closing: of a block.
        call: with the places NAME, or QUOTED for a name in quotes, ARGUMENTS, and ID if it has one.
        between_calls: in one block; None: a block has one.
        between_blocks: None: a text has one.
        optional_marker: that a model may write before the first block.
        other_calls: other ways to write `call`, of which a model may choose one.
        told: what text beside calls begins with, where it is blocks of its own: one of these.
        id_pattern: a regular expression of what may be an ID.
    """

    opening: str
    closing: str
    call: str = JSON_CALL
    between_calls: str | None = None
    between_blocks: str | None = None
    optional_marker: str | None = None
    other_calls: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    id_pattern: str = "[0-9]{1,9}"


@dataclass(frozen=True, slots=True)
class Matched:
    """A value that is any text of a regular expression."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Nested:
    """A value that is written in tags itself, one after the other."""

    tagged: tuple[Tagged, ...]


Value = Mapping[str, Any] | tuple[str, ...] | Matched | Nested | None


@dataclass(frozen=True, slots=True)
class Tagged:
    """How an argument is written that stands in tags: `before`, name, `between`, value, `after`.

    Attributes:
        name: None: any.
        value: the JSON schema of a value in JSON; or texts, of which it is one; or what these are
            made of; None: any text.
        times: "" for once, or "?" or "*".
        other: another way to write it, which the model may choose.
    """

    before: str
    between: str
    after: str
    name: str | None = None
    value: Value = None
    times: str = ""
    other: Tagged | None = None


@dataclass(frozen=True, slots=True)
class TaggedCall:
    """How a call is written whose arguments stand in tags."""

    before: str
    arguments: tuple[Tagged, ...]
    behind: str


@dataclass(frozen=True, slots=True)
class Literals:
    """How a call is written whose arguments are values in a language of their own.

    Attributes:
        call: as of `Written`.
        words: what booleans are, true and false in turn, and null, by the name of the type.
        quote: on both sides of a text, which stands there as it is; empty: arguments and values are
            Python's.
        holds_any: whether every other value may stand between quotes, too.
        is_sorted: whether members stand in the order of their names.
    """

    call: str
    words: Mapping[str, tuple[str, ...]]
    quote: str = ""
    holds_any: bool = False
    is_sorted: bool = False

    @property
    def is_python(self) -> bool:
        """Whether arguments and values are Python's."""
        return not self.quote


PYTHON_LITERALS = Literals(
    f"{NAME}({ARGUMENTS})", {"boolean": ("True", "False"), "null": ("None",)}
)


def long_id() -> str:
    """Return an id of a call as OpenAI's look."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One syntax of tool calls.

    Attributes:
        name: vLLM's name of it; variants that are read alike share one.
        markers: texts that open a block wherever they stand.
        begins: what a block may begin with, without a marker, at the beginning of a text, where
            functions of some names are offered.
        headers: what text beside calls may begin with at the beginning of all; it is not told.
        goes_on: characters that a block may begin with, without a marker, right behind another one.
        further: other texts of a block that may be special tokens.
        read: reads a block.
        written: how calls are written where they are forced or strict.
        recognizes: whether a chat template has the model write this.
        between: parts content from content, where a call or a block that is not told is between.
        tagged: how a call of a function with such parameters is written, where that is in tags;
            None: it cannot be, so `written` says how.
        literals: how arguments are written, where they are no JSON; where parameters ask for more
            than that can say, `written` says how.
        new_id: makes the id of a call, which the template may ask something of.
        exact: reads calls that a grammar wrote, where that is another reader: what models forget
            is not missing there.
        ends_thought: texts before calls that end a thought which was not closed: none speaks of
            them.
        ends_thought_with: blocks of calls that end such a thought where nothing follows them, since
            thoughts may speak of them.
        of_template: returns the format of a template that is recognized, where that names tags.
    """

    name: str
    markers: tuple[str, ...]
    read: Reader
    written: Written
    recognizes: Callable[[str], bool]
    begins: Callable[[Iterable[str]], tuple[str, ...]] = lambda functions: ()
    headers: tuple[str, ...] = ()
    goes_on: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    between: str = ""
    tagged: Callable[[str, Mapping[str, Any]], TaggedCall | None] | None = None
    literals: Literals | None = None
    new_id: Callable[[], str] = long_id
    exact: Reader | None = None
    ends_thought: tuple[str, ...] = ()
    ends_thought_with: tuple[Enclosed, ...] = ()
    of_template: Callable[[str], ToolFormat] | None = None

    def id_of(self, call: ParsedCall) -> str:
        """Return the id of a call: the model's own, or a new one."""
        return call.id or self.new_id()

    @property
    def has_channels(self) -> bool:
        """Whether all text is written in messages that have a channel."""
        return bool(self.written.told)

    @property
    def tokens(self) -> tuple[str, ...]:
        """Every text of the syntax that may be a special token."""
        return self.markers + self.further
