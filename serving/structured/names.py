"""What grammars call tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenNames:
    """The names of a model's tokens, by which grammars may ask for one instead of text.

    Attributes:
        texts: of added tokens in angle brackets that are text like any other.
        ids: of all tokens in angle brackets.
        size: tokens that there are, those with no text among them.
        never: ids that no text has: end tokens, and what the tokenizer does not know.
    """

    texts: frozenset[str] = frozenset()
    ids: Mapping[str, int] = field(default_factory=dict)
    size: int = 0
    never: frozenset[int] = frozenset()

    def only(self, name: str, number: str | None) -> str:
        """Return a token in llguidance's syntax.

        Args:
            name: in angle brackets, `<think>`.
            number: its id in digits, where the name is that; None: it is not.

        Raises:
            ValueError: there is no such token, or no text has it.
        """
        found = self._id(name, number)
        if found in self.never:
            raise ValueError(
                f"{name} is an end token, or one without a text; leave it out: a text may end "
                "where the grammar does"
            )
        return f"<[{found}]>"

    def excluding(self, name: str, number: str | None) -> str:
        """Return any token but one, which are those that a text may have, in llguidance's syntax.

        Args:
            name: see `only`.
            number: the same.

        Raises:
            ValueError: there is no such token.
        """
        ids = sorted({self._id(name, number), *self.never})
        return f"<[^{','.join(_ranges(ids))}]>"

    def _id(self, name: str, number: str | None) -> int:
        found = self.ids.get(name) if number is None else int(number)
        if found is None:
            raise ValueError(
                f"{name} is no single token of this model; write it as a text, or name another one"
            )
        if found >= self.size:
            raise ValueError(f"there is no token {name}; the model has {self.size}")
        return found


def _ranges(ids: Iterable[int]) -> Iterator[str]:
    """Yield ranges of numbers, which are in order."""
    begin = end = -1
    for one in ids:
        if one == end + 1 and begin >= 0:
            end = one
            continue
        if begin >= 0:
            yield f"{begin}-{end}" if end > begin else f"{begin}"
        begin = end = one
    if begin >= 0:
        yield f"{begin}-{end}" if end > begin else f"{begin}"


NO_NAMES = TokenNames()
