"""Which schemas of a JSON schema may meet in one value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_TOGETHER = ("allOf", "anyOf", "oneOf")
Member = tuple[str, str]  # "named", "any" or "item", and the name, the pattern or the place
_REST = ("item", "")  # of an array: what is at no place of its own
MOST_TRIED = 5_000  # names with patterns, of all values
MOST_PASSES = 64  # over all values; what meets in one may meet in the next
# Of patterns and names that are tried. With one repeat steps are as the square of the name's length
# at most, with several there is no such bound.
MOST_CHARS = 100
_REPEATS = "*+?{|"
_NESTED = re.compile(r"\[[^\]]*\[")  # classes in a class, perhaps, which Python does not know
_OTHERS = ("any", "")  # of an object: what is not listed


def values(schemas: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield groups of schemas that may apply to one value, so far as they can be told apart.

    A schema applies with what it refers to and with its alternatives, and of those that do so
    properties of one name, too. Groups are rather too large than too small.

    Args:
        schemas: all schemas inside one, by their JSON pointers.
    """
    groups = _Groups(schemas)
    for where, one in schemas.items():
        if not isinstance(one, dict):
            continue
        if "$ref" in one:
            groups.join(where, unquote(one["$ref"]))
        for name in _TOGETHER:
            for index in range(len(one.get(name, ()))):
                groups.join(where, f"{where}/{name}/{index}")
    groups.join_members()
    yield from groups.all()


class _Groups:
    """Disjoint sets of schemas, and of each set the members of its values."""

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._above = {where: where for where in schemas}
        self._members = {where: dict(_members(where, one)) for where, one in schemas.items()}
        # How many schemas speak of a value's members.
        self._sizes = {where: int(bool(members)) for where, members in self._members.items()}
        self._fitting: dict[tuple[str, str], bool] = {}  # by pattern and name

    def join(self, one: str, other: str) -> None:
        """Put two schemas in one set, and members of the same name of their values."""
        pending = [(one, other)]
        while pending:
            first, second = map(self._top, pending.pop())
            if first == second:
                continue
            if len(self._members[first]) < len(self._members[second]):
                first, second = second, first
            self._above[second] = first
            self._sizes[first] += self._sizes[second]
            mine = self._members[first]
            for key, where in self._members.pop(second).items():
                if key in mine:
                    pending.append((mine[key], where))
                else:
                    mine[key] = where

    def join_members(self) -> None:
        """Let members of any name meet those they may be, where the schemas do not tell them apart.

        Where one schema alone speaks of them, its rest is what it does not list; patterns may fit
        what it lists.
        """
        changed = True
        passes = 0
        while changed and passes < MOST_PASSES:
            changed = False
            passes += 1
            for top in list(self._members):
                members = self._members.get(top, {})
                pairs = list(self._meeting(members, alone=self._sizes[top] < 2))
                changed |= any(self._top(one) != self._top(other) for one, other in pairs)
                for one, other in pairs:
                    self.join(one, other)
        if changed:  # rather too large than too small
            first, *others = self._schemas
            for other in others:
                self.join(first, other)

    def all(self) -> Iterator[list[Mapping[str, Any]]]:
        """Yield the sets."""
        found: dict[str, list[Mapping[str, Any]]] = {}
        for where, one in self._schemas.items():
            if isinstance(one, dict):
                found.setdefault(self._top(where), []).append(one)
        yield from found.values()

    def _meeting(self, members: Mapping[Member, str], *, alone: bool) -> Iterator[tuple[str, str]]:
        """Yield pairs of a value's members that may be one.

        Args:
            members: by what they are called.
            alone: whether one schema has all of them.
        """
        named = [(key, where) for (kind, key), where in members.items() if kind == "named"]
        patterns = [(key, where) for (kind, key), where in members.items() if kind == "any" and key]
        if len(named) * len(patterns) > MOST_TRIED - len(self._fitting):  # each may fit each
            for _, where in (*named, *patterns[1:]):
                yield patterns[0][1], where
        else:
            for pattern, other in patterns:
                for key, where in named:
                    if self._may_fit(pattern, key):
                        yield where, other
        if alone:
            return
        for rest, kinds in ((_OTHERS, ("named", "any")), (_REST, ("item",))):
            if rest in members:
                for (kind, _), where in members.items():
                    if kind in kinds:
                        yield where, members[rest]
        for _, where in patterns[1:]:  # of different schemas, perhaps, and one name may fit both
            yield patterns[0][1], where

    def _may_fit(self, pattern: str, name: str) -> bool:
        if (pattern, name) not in self._fitting:
            self._fitting[pattern, name] = may_fit(pattern, name)
        return self._fitting[pattern, name]

    def _top(self, where: str) -> str:
        while (above := self._above[where]) != where:
            self._above[where] = where = self._above[above]
        return where


def _members(where: str, schema: Any) -> Iterator[tuple[Member, str]]:
    """Yield the schemas of a value's members, and what they are called."""
    if not isinstance(schema, dict):
        return
    for name, kind in (("properties", "named"), ("patternProperties", "any")):
        for key in schema.get(name, ()):
            escaped = key.replace("~", "~0").replace("/", "~1")
            yield (kind, key), f"{where}/{name}/{escaped}"
    if "additionalProperties" in schema:
        yield ("any", ""), f"{where}/additionalProperties"
    for index in range(len(schema.get("prefixItems", ()))):
        yield ("item", str(index)), f"{where}/prefixItems/{index}"
    if "items" in schema:
        yield _REST, f"{where}/items"


def may_fit(pattern: str, name: str) -> bool:
    """Whether a name may fit a pattern: it is tried, unless that could take long."""
    repeats = sum(map(pattern.count, _REPEATS))
    if repeats > 1 or max(len(pattern), len(name)) > MOST_CHARS or _NESTED.search(pattern):
        return True
    try:
        return re.search(pattern, name) is not None
    except (re.error, OverflowError):  # it is written for another library
        return True
