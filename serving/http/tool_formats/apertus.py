"""`<|tools_prefix|>[{"f": {…}}, {"g": {…}}]<|tools_suffix|>`: Apertus.

Each object has one member, whose name is the function's. Source: the models' chat template.
"""

from __future__ import annotations

from typing import Any

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    QUOTED,
    Functions,
    ParsedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.json_calls import JsonReader, call

OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"


def call_of(value: Any, functions: Functions) -> ParsedCall | None:
    """Return the call that an object of one member is."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    [(name, arguments)] = value.items()
    return call(name, {} if arguments is None else arguments, functions)


APERTUS = ToolFormat(
    "apertus",
    markers=(OPEN,),
    further=(CLOSE,),
    read=JsonReader((OPEN,), closing=CLOSE, call_of=call_of),
    written=Written(f"{OPEN}[", f"]{CLOSE}", f"{{{QUOTED}: {ARGUMENTS}}}", between_calls=", "),
    recognizes=lambda template: OPEN in template,
)
