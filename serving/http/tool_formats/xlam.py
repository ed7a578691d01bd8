"""`[{"name": …, "arguments": {…}}]`, and nothing else: xLAM 2.

It may also stand in a fence of JSON, or in the marks of the models that xLAM was made from. Source:
the models' chat templates, and what vLLM reads of them.
"""

from __future__ import annotations

from onnxport.serving.http.tool_formats.base import Block, Functions, ToolFormat, Written
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.json_calls import JsonReader

_AROUND = {"```json": "```", "<tool_call>": "</tool_call>", "[TOOL_CALLS]": None}
_READERS = {opening: JsonReader((opening,), closing) for opening, closing in _AROUND.items()}
_read_bare = JsonReader(())


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that may begin at `start`; see `Reader`."""
    opening = Cursor(text, start, final).take(*_AROUND)
    return (_READERS[opening] if opening else _read_bare)(text, start, final, functions)


XLAM = ToolFormat(
    "xlam",
    markers=tuple(_AROUND),
    begins=lambda functions: ("[",),
    further=("</tool_call>",),
    read=read,
    written=Written("[", "]", between_calls=", "),
    recognizes=lambda template: "make calls in a single JSON array" in template,
)
