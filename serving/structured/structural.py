"""Structural tags: text that is free but for tags, each with a content of its own.

Two dialects, as vLLM has them. The older one lists `structures` and `triggers`; the newer one,
xgrammar's, is a tree of formats. Both are read here into the same tree, as it is compiled
(`tags.py`): what is not known is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any

from onnxport.errors import RequestError
from onnxport.serving.structured.prepared import prepared

MAX_DEPTH = 16  # formats in each other
MAX_FORMATS = 2000
MAX_TEXTS = 128  # of one list of triggers, excludes or ends, which are compared with each other
MAX_TIMES = 10_000  # that a format is repeated
ENDLESS = -1  # xgrammar's word for any number of times
KIND = "structural_tag"
# Which members each format has: (needed, others).
FORMATS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "const_string": (("value",), ()),
    "json_schema": (("json_schema",), ("style",)),
    "any_text": ((), ("excludes",)),
    "grammar": (("grammar",), ()),
    "regex": (("pattern",), ()),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "optional": (("content",), ()),
    "plus": (("content",), ()),
    "star": (("content",), ()),
    "repeat": (("min", "max", "content"), ()),
    "tag": (("begin", "content", "end"), ()),
    "triggered_tags": (
        ("triggers", "tags"),
        ("at_least_one", "stop_after_first", "excludes"),
    ),
    "tags_with_separator": (("tags", "separator"), ("at_least_one", "stop_after_first")),
}
TIMES: Mapping[str, tuple[int, int]] = {
    "optional": (0, 1),
    "plus": (1, ENDLESS),
    "star": (0, ENDLESS),
}
# Members that xgrammar has besides, with the value that says nothing, as its own classes write it.
SILENT: Mapping[str, Mapping[str, Any]] = {
    "any_text": {"max_chars": None, "max_tokens": None},
    "json_schema": {"any_order": False},
}
_OF_TOKENS = "forms know text and no tokens; write the text of the token"
# Formats that xgrammar has besides, and what to do.
REFUSED: Mapping[str, str] = {
    "any_tokens": _OF_TOKENS,
    "dispatch": "write triggered_tags, whose tags may have an empty end",
    "exclude_token": _OF_TOKENS,
    "qwen_xml_parameter": "write a tag of each parameter",
    "token": _OF_TOKENS,
    "token_dispatch": _OF_TOKENS,
    "token_triggered_tags": _OF_TOKENS,
}


def read(given: Any, param: str) -> dict[str, Any]:
    """Return a checked structural tag in the newer dialect, in which nothing is left out.

    Schemas in it are prepared, so that all of each is enforced. What is returned may be read again.

    Args:
        given: as JSON is read.
        param: the request's field that errors name.

    Raises:
        RequestError: says where, what was found and what is allowed.
    """
    return {"type": KIND, "format": _Reader(param).whole(given)}


def free_end(format_: Mapping[str, Any]) -> bool:
    """Whether a format ends with free text, which what stands behind has to tell the end of."""
    kind = format_["type"]
    if kind == "sequence":
        return free_end(format_["elements"][-1])
    if kind == "or":
        return any(map(free_end, format_["elements"]))
    if kind == "repeat":
        return free_end(format_["content"])
    if kind == "triggered_tags":
        return not (format_["at_least_one"] and format_["stop_after_first"])
    return bool(kind == "any_text")


def contents(format_: Mapping[str, Any], place: str = "format") -> Iterator[tuple[str, Any]]:
    """Yield the formats in a checked one that have no others in them, each behind its place.

    Args:
        format_: as `read` gives it.
        place: where it stands.
    """
    parts = [(f"{place}.content", format_["content"])] if "content" in format_ else []
    for name in ("elements", "tags"):
        each = enumerate(format_.get(name, ()))
        parts += [(f"{place}.{name}[{index}]", one) for index, one in each]
    for where, one in parts:
        yield from contents(one, where)
    if not parts:
        yield place, format_


class _Reader:
    """Reads one structural tag."""

    def __init__(self, param: str) -> None:
        self._param = param
        self._num_formats = 0
        self._kinds: Mapping[str, Callable[[Mapping[str, Any], str, int], dict[str, Any]]] = {
            "sequence": self._list,
            "or": self._list,
            "optional": self._repeated,
            "plus": self._repeated,
            "star": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def whole(self, given: Any) -> dict[str, Any]:
        """Return the format of either dialect."""
        members = self._members(given, "the structural tag", f'"type": "{KIND}" and "format"')
        if members.get("type") != KIND:
            raise self._error(
                f"the structural tag has the type {_short(members.get('type'))}; its type is "
                f"{KIND!r}"
            )
        names = set(members) - {"type"}
        if names == {"format"}:
            result = self._format(members["format"], "format", 0)
            self._check_ends(result, "format", ())
            return result
        if names == {"structures", "triggers"}:
            result = self._older(members)
            self._check_ends(result, "structures", ())
            return result
        raise self._error(
            f"the structural tag has {_listed(names)}; it has 'format', or, as vLLM had it first, "
            "'structures' and 'triggers'"
        )

    def _older(self, given: Mapping[str, Any]) -> dict[str, Any]:
        tags = []
        for index, one in enumerate(self._some(given["structures"], "structures")):
            place = f"structures[{index}]"
            tag = self._members(one, place, "begin, schema and end")
            self._check_names(tag, place, ("begin", "schema", "end"), ())
            content = {"type": "json_schema", "json_schema": tag["schema"]}
            tags.append(
                {"type": "tag", "begin": tag["begin"], "content": content, "end": tag["end"]}
            )
        result = {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}
        return self._triggered(result, "", 0)

    def _format(self, given: Any, place: str, depth: int) -> dict[str, Any]:
        """Return a format; `place` is where it stands, for errors."""
        allowed = ", ".join(FORMATS)
        self._num_formats += 1
        if depth > MAX_DEPTH or self._num_formats > MAX_FORMATS:
            raise self._error(
                f"{place} is more than {MAX_DEPTH} formats deep, or there are more than "
                f"{MAX_FORMATS}; make it simpler"
            )
        members = self._members(given, place, f"a type of {allowed}")
        kind = members.get("type")
        if not isinstance(kind, str) or kind not in FORMATS:
            hint = REFUSED.get(kind) if isinstance(kind, str) else None
            raise self._error(
                f"{place} has the type {_short(kind)}, which is not supported; "
                f"{hint or 'choose another one'}; the types are {allowed}"
            )
        silent = SILENT.get(kind, {})
        members = {
            name: value
            for name, value in members.items()
            if name not in silent or value is not silent[name]
        }
        needed, others = FORMATS[kind]
        self._check_names(members, place, needed, others)
        return self._kinds.get(kind, self._leaf)(members, place, depth)

    def _leaf(self, given: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        """Return a format that has no others in it."""
        kind = given["type"]
        if kind == "any_text":
            excludes = self._texts(given.get("excludes") or [], f"{place}.excludes", least=0)
            return {"type": kind, "excludes": excludes}
        if kind == "json_schema":
            if given.get("style", "json") != "json":
                raise self._error(
                    f"{place}.style is {_short(given['style'])}; only 'json' is supported"
                )
            schema = given["json_schema"]
            if not isinstance(schema, Mapping | bool):
                raise self._error(f"{place}.json_schema is {_short(schema)}; it must be a schema")
            try:
                ready = prepared(schema, self._param)
            except RequestError as error:
                raise self._error(f"{place}: {error}") from error
            return {"type": kind, "json_schema": ready.schema}
        [name] = FORMATS[kind][0]
        return {"type": kind, name: self._text(given[name], f"{place}.{name}", is_empty=False)}

    def _list(self, given: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        elements = [
            self._format(one, f"{place}.elements[{index}]", depth + 1)
            for index, one in enumerate(self._some(given["elements"], f"{place}.elements"))
        ]
        for index, one in enumerate(elements[:-1] if given["type"] == "sequence" else ()):
            if free_end(one):
                raise self._error(
                    f"{place}.elements[{index}] ends with free text, whose end nothing tells; put "
                    "it last, or into a tag"
                )
        return {"type": given["type"], "elements": elements}

    def _repeated(self, given: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        """Return a format that comes several times, whatever its name, as `repeat`."""
        kind = given["type"]
        least, most = TIMES[kind] if kind in TIMES else self._times(given, place)
        content = self._format(given["content"], f"{place}.content", depth + 1)
        if most != 1 and free_end(content):
            raise self._error(
                f"{place}.content ends with free text, whose end nothing tells, and may come "
                "again; put it into a tag"
            )
        return {"type": "repeat", "min": least, "max": most, "content": content}

    def _times(self, given: Mapping[str, Any], place: str) -> tuple[int, int]:
        """Return how often a format comes, at least and at most."""
        for name in ("min", "max"):
            if type(given[name]) is not int:
                raise self._error(
                    f"{place}.{name} is {_short(given[name])}; it must be a whole number"
                )
        least, most = given["min"], given["max"]
        if not 0 <= least <= MAX_TIMES or not (most == ENDLESS or 0 < most <= MAX_TIMES):
            raise self._error(
                f"{place} comes {_short(least)} to {_short(most)} times; min is 0 to {MAX_TIMES}, "
                f"and max is 1 to {MAX_TIMES}, or {ENDLESS} for any number"
            )
        if most != ENDLESS and most < least:
            raise self._error(f"{place}.max is {most}, less than min, which is {least}; raise it")
        return least, most

    def _tag(self, given: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        end = given["end"]
        ends = self._some(end, f"{place}.end") if isinstance(end, list) else [end]
        self._check_number(ends, f"{place}.end")
        ends = list(dict.fromkeys(self._text(one, f"{place}.end") for one in ends))
        content = self._format(given["content"], _at(place, "content"), depth + 1)
        if "" in ends and free_end(content):
            raise self._error(
                f"{place}.end is empty behind free text, whose end nothing tells; give a text"
            )
        begin = self._text(given["begin"], f"{place}.begin", is_empty=False)
        return {"type": "tag", "begin": begin, "content": content, "end": ends}

    def _tags(self, given: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        """Return what formats of several tags have together, whose type goes without saying."""
        where = _at(place, "tags") if place else "structures"
        tags = [
            self._format(
                {"type": "tag", **one} if isinstance(one, Mapping) else one,
                f"{where}[{index}]",
                depth + 1,
            )
            for index, one in enumerate(self._some(given["tags"], where))
        ]
        for index, tag in enumerate(tags):
            if tag["type"] != "tag":
                raise self._error(
                    f"{where}[{index}] has the type {tag['type']!r}; it must be a tag"
                )
        result: dict[str, Any] = {"type": given["type"], "tags": tags}
        for name in ("at_least_one", "stop_after_first"):
            result[name] = given.get(name, False)
            if not isinstance(result[name], bool):
                raise self._error(
                    f"{_at(place, name)} is {_short(result[name])}; it must be true or false"
                )
        return result

    def _triggered(self, given: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        triggers = self._texts(given["triggers"], _at(place, "triggers"))
        excludes = self._texts(given.get("excludes") or [], _at(place, "excludes"), least=0)
        result = self._tags(given, place, depth)
        for tag in result["tags"]:
            if not any(tag["begin"].startswith(trigger) for trigger in triggers):
                raise self._error(
                    f"the tag that begins with {_short(tag['begin'])} begins with none of the "
                    f"triggers {_listed(triggers)}; add one"
                )
        for trigger in triggers:
            if not any(tag["begin"].startswith(trigger) for tag in result["tags"]):
                raise self._error(
                    f"no tag begins with the trigger {_short(trigger)}; remove it, or add one"
                )
        return {**result, "triggers": triggers, "excludes": excludes}

    def _separated(self, given: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        separator = self._text(given["separator"], f"{place}.separator")
        return {**self._tags(given, place, depth), "separator": separator}

    def _check_ends(self, given: Mapping[str, Any], place: str, ends: tuple[str, ...]) -> None:
        """Refuse texts that end free text of which one has another in it.

        Args:
            given: the format.
            place: where it stands.
            ends: of the tag around that ends it.
        """
        kind = given["type"]
        marks = {"trigger": given.get("triggers", ()), "exclude": given.get("excludes", ())}
        if free_end(given) and any(marks.values()):
            told = [*marks["trigger"], *marks["exclude"], *ends]
            for one, other in permutations(told, 2):
                if one in other:
                    raise self._error(
                        f"in {place} {_short(one)} is a part of {_short(other)}, and both end free "
                        "text; triggers, excludes and the end of the tag around must not contain "
                        "each other"
                    )
        if "content" in given:
            inner = tuple(given["end"]) if kind == "tag" else ends
            self._check_ends(given["content"], f"{place}.content", inner)
        for index, one in enumerate(given.get("elements", ())):
            is_last = kind == "or" or index == len(given["elements"]) - 1
            self._check_ends(one, f"{place}.elements[{index}]", ends if is_last else ())
        for index, one in enumerate(given.get("tags", ())):
            self._check_ends(one, f"{place}.tags[{index}]", ())

    def _members(self, given: Any, place: str, what: str) -> Mapping[str, Any]:
        if not isinstance(given, Mapping):
            raise self._error(f"{place} is {_short(given)}; it must be an object with {what}")
        return given

    def _check_names(
        self, given: Mapping[str, Any], place: str, needed: tuple[str, ...], others: tuple[str, ...]
    ) -> None:
        missing = [name for name in needed if name not in given]
        unknown = [name for name in given if name not in ("type", *needed, *others)]
        if missing or unknown:
            found = f"has {_short(unknown[0])}" if unknown else f"lacks {missing[0]!r}"
            raise self._error(
                f"{place} {found}; it needs {', '.join(needed) or 'nothing'}, and may have "
                f"{', '.join(others) or 'nothing else'}"
            )

    def _some(self, given: Any, place: str, least: int = 1) -> list[Any]:
        if not isinstance(given, list) or len(given) < least:
            raise self._error(f"{place} is {_short(given)}; it must be a list with {least} or more")
        return given

    def _texts(self, given: Any, place: str, least: int = 1) -> list[str]:
        texts = self._some(given, place, least)
        self._check_number(texts, place)
        return list(dict.fromkeys(self._text(one, place, is_empty=False) for one in texts))

    def _check_number(self, texts: list[Any], place: str) -> None:
        if len(texts) > MAX_TEXTS:
            raise self._error(f"{place} has {len(texts)} texts; it may have {MAX_TEXTS} at most")

    def _text(self, given: Any, place: str, *, is_empty: bool = True) -> str:
        if not isinstance(given, str) or not (given or is_empty):
            what = "a text" if is_empty else "a text that is not empty"
            raise self._error(f"{place} is {_short(given)}; it must be {what}")
        return given

    def _error(self, message: str) -> RequestError:
        return RequestError(message, self._param)


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _short(value: Any) -> str:
    return repr(value)[:80]


def _listed(names: Any) -> str:
    return (", ".join(repr(name) for name in sorted(names)) or "nothing else")[:200]
