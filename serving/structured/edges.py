"""What the texts of a format of a structural tag begin and end with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnxport.serving.structured.structural import ENDLESS

# What JSON may begin with; of white space there is some where there may be several such texts.
JSON_BEGINS = frozenset('{["-0123456789tfn \t\r\n')


def takes(format_: Mapping[str, Any], ends: Sequence[str]) -> bool:
    """Whether a text before a format is better written with each of its beginnings than apart.

    Apart it would be a lexeme, which a longer one that begins alike hides: that of a tag elsewhere.

    Args:
        format_: the format.
        ends: what stands behind it, of which one may be all there is of an optional format.
    """
    texts: set[str] = set()
    has_json = False
    for one in _first_ones(format_, ends):
        if isinstance(one, str):
            texts.add(one[0])
        elif one["type"] == "json_schema":
            has_json = True
        else:
            return False
    return not (has_json and texts & JSON_BEGINS)


def _first_ones(
    format_: Mapping[str, Any], ends: Sequence[str]
) -> Iterator[str | Mapping[str, Any]]:
    """Yield what the texts of a format begin with: texts, and formats of which that is not known.

    Args:
        format_: the format.
        ends: what stands behind it, where that is known.
    """
    kind = format_["type"]
    is_optional = False
    if kind == "const_string":
        yield format_["value"]
    elif kind == "tag":
        yield format_["begin"]
    elif kind == "sequence":
        elements = format_["elements"]
        yield from _first_ones(elements[0], () if len(elements) > 1 else ends)
    elif kind == "or":
        for one in format_["elements"]:  # what ends them may be written behind all of them
            yield from _first_ones(one, ())
    elif kind == "tags_with_separator" or (kind == "triggered_tags" and format_["at_least_one"]):
        yield from (tag["begin"] for tag in format_["tags"])
        is_optional = not format_["at_least_one"]
    elif kind == "repeat" and format_["max"] == 1:
        yield from _first_ones(format_["content"], ends)
        is_optional = not format_["min"]
    else:
        yield format_
    if is_optional:
        yield from ends if ends and "" not in ends else (format_,)


def times_of(format_: Mapping[str, Any]) -> tuple[Mapping[str, Any], int, int]:
    """Return what a format repeats, how often at least, and how often at most.

    What is repeated in another is so many times in all where that says the same: in each other,
    counts of the two could be told apart in more ways than there are texts.
    """
    content, least, most = format_["content"], format_["min"], format_["max"]
    while content["type"] == "repeat":
        low, high = content["min"], content["max"]
        whole = ENDLESS if ENDLESS in (most, high) else most * high
        fewest = max(1, least)  # times of the outer one, of which one more leaves no gap
        is_gapless = high == ENDLESS or (fewest + 1) * low <= fewest * high + 1 or most == fewest
        if not is_gapless or (not least and low > 1):
            break
        content, least, most = content["content"], least * low, whole
    return content, least, most


def flat(elements: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield elements of a sequence, those of others in it among them."""
    for one in elements:
        if one["type"] == "sequence":
            yield from flat(one["elements"])
        else:
            yield one


def last_ones(elements: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the elements of a sequence that may be the last one of a text, from the end."""
    for one in reversed(elements):
        yield one
        if not may_be_empty(one):
            return


def may_be_empty(format_: Mapping[str, Any]) -> bool:
    """Whether a format may be the empty text, so far as can be told without its expressions."""
    kind = format_["type"]
    if kind == "sequence":
        return all(map(may_be_empty, format_["elements"]))
    if kind == "or":
        return any(map(may_be_empty, format_["elements"]))
    if kind == "repeat":
        return format_["min"] == 0 or may_be_empty(format_["content"])
    if kind in ("triggered_tags", "tags_with_separator"):
        return not format_["at_least_one"]
    return kind in ("any_text", "regex")
