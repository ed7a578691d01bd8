"""`{"name": …, "parameters": {…}}`: Llama 3.1, 3.2 and 3.3.

The text is the call, or several with `;` between them; `<|python_tag|>` may come before. Source:
the models' chat templates and Meta's description of their prompts.
"""

from __future__ import annotations

from dataclasses import replace

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    QUOTED,
    Block,
    Functions,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.json_calls import JsonReader
from onnxport.serving.http.tool_formats.pythonic import calls_in

TAG, METHOD = "<|python_tag|>", ".call"
_read_json = JsonReader((TAG,), separator=";")


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that may begin at `start`; see `Reader`."""
    cursor = Cursor(text, start, final)
    if not cursor.take(TAG):
        return _read_json(text, start, final, functions)
    none = Block(cursor.at)
    cursor.skip_space()
    if cursor.next() in ("[", "{"):
        return _read_json(text, start, final, functions)
    name = cursor.take(*(f"{name}{METHOD}" for name in functions))
    if name is None or cursor.next() != "(":
        return none
    arguments = cursor.brackets(python=True)
    found = calls_in(arguments and f"[{name.removesuffix(METHOD)}{arguments}]", functions)
    return Block(cursor.at, found) if found else replace(none, seen=cursor.seen)


LLAMA3_JSON = ToolFormat(
    "llama3_json",
    markers=(TAG,),
    begins=lambda functions: ("{",),
    goes_on=(";", "{"),
    read=read,
    written=Written(
        "",
        "",
        f'{{"name": {QUOTED}, "parameters": {ARGUMENTS}}}',
        between_calls="; ",
        optional_marker=TAG,
    ),
    recognizes=lambda template: TAG in template or '"parameters": dictionary of' in template,
)
