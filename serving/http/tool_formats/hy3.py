"""Hunyuan 3's calls, which are GLM's in tags of other names, with a pair around all of an answer.

    <tool_calls:opensource>
    <tool_call:opensource>f<tool_sep:opensource>
    <arg_key:opensource>a</arg_key:opensource>
    <arg_value:opensource>1</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>

The suffix is of the release; there may be none. Source: the model's chat template, and
what vLLM reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import (
    JSON_CALL,
    Block,
    Functions,
    Reader,
    TaggedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.sections import ends_behind, open_call
from onnxport.serving.http.tool_formats.xml_calls import Tags

RELEASE: Final = ":opensource"
NAMES: Final = ("tool_calls", "tool_call", "arg_key", "arg_value")


SIGNS: Final = ("<tool_sep", "<arg_key")


def _hy3(suffix: str, sign: str) -> ToolFormat:
    """Return the format of the tags with a suffix, of templates with a sign beside `SIGNS`."""
    separator = f"<tool_sep{suffix}>"
    calls, call, key, value = ((f"<{each}{suffix}>", f"</{each}{suffix}>") for each in NAMES)
    tags = Tags(call, ("", separator), key, value)

    def reader(tags: Tags) -> Reader:
        def read(text: str, start: int, final: bool, functions: Functions) -> Block:
            cursor = Cursor(text, start, final)
            is_opened, behind = open_call(cursor, calls[0], call[0])
            if not is_opened:
                return Block(behind)
            found = tags(text, cursor.at - len(call[0]), final, functions)
            if not found.calls:
                return found
            return replace(found, end=ends_behind(text, found.end, final, [calls[1]]))

        return read

    def tagged(name: str, parameters: Mapping[str, Any]) -> TaggedCall | None:
        inner = tags.written(name, parameters)
        return inner and TaggedCall(
            f"{call[0]}{inner.before}", inner.arguments, f"{inner.behind}{call[1]}\n"
        )

    return ToolFormat(
        "hy_v3",
        markers=(calls[0], call[0]),
        further=(calls[1], call[1], separator, *key, *value),
        read=reader(tags),
        written=Written(
            f"{calls[0]}\n", calls[1], f"{call[0]}\n{JSON_CALL}\n{call[1]}\n", between_calls=""
        ),
        tagged=tagged,
        exact=reader(replace(tags, is_exact=True)),
        recognizes=lambda template: sign in template and all(each in template for each in SIGNS),
    )


HY3, HY3_PLAIN = _hy3(RELEASE, RELEASE), _hy3("", "")
