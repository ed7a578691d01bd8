"""Formats of JSON Schema by another implementation, and by their RFCs where that errs."""

from __future__ import annotations

import re
from copy import copy
from typing import Any

from jsonschema import FormatChecker

NO_LITERAL = re.compile(r"[\x00-\x20\"'<>\\^`|]|%(?![0-9A-Fa-f]{2})")


def format_checker(given: FormatChecker) -> FormatChecker:
    """Return a checker that takes relative JSON pointers up 10, and templates' literals alone."""

    def is_relative(text: Any) -> bool:
        if not isinstance(text, str):
            return True
        number = re.match("0|[1-9][0-9]*", text)
        rest = text[number.end() :] if number else "none"
        return rest == "#" or given.conforms(rest, "json-pointer")

    def is_template(text: Any) -> bool:
        if not isinstance(text, str):
            return True
        literals = re.sub(r"\{[^}]*\}", "", text)
        return given.conforms(text, "uri-template") and not NO_LITERAL.search(literals)

    checker = copy(given)
    checker.checkers = {
        **given.checkers,
        "relative-json-pointer": (is_relative, ()),
        "uri-template": (is_template, ()),
    }
    return checker
