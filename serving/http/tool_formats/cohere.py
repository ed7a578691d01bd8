"""`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`.

So do Cohere's Command R7B, Command A and North write calls. Command R and R+ write lists without
ids behind `Action:`, in a fence of JSON. Chat templates number the calls of a conversation,
so those of an answer get ids of ours. Source: the models' chat templates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    ID,
    QUOTED,
    Block,
    Functions,
    ParsedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.json_calls import JsonReader, call

OPEN, CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
TEXT = "<|START_TEXT|>"  # before an answer, of the newer models
ACTION, FENCE, FENCE_END = "Action:", "```json", "```"


def call_of(value: Any, functions: Functions) -> ParsedCall | None:
    """Return the call that an object is."""
    if not isinstance(value, dict) or not isinstance(value.get("tool_name"), str):
        return None
    arguments = value.get("parameters")
    return call(value["tool_name"], {} if arguments is None else arguments, functions)


_read_fenced = JsonReader((FENCE,), closing=FENCE_END, call_of=call_of)


def read_action(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the block that begins at `start`; see `Reader`."""
    cursor = Cursor(text, start + len(ACTION), final)
    none = Block(cursor.at)
    cursor.skip_space()
    begin = cursor.at
    if not cursor.take(FENCE):
        return none
    found = _read_fenced(text, begin, final, functions)
    return found if found.calls else replace(none, seen=found.seen)


def _action(name: str, recognizes: Callable[[str], bool]) -> ToolFormat:
    """Return the format of a generation of models; they write calls alike."""
    return ToolFormat(
        name,
        markers=(OPEN,),
        further=(CLOSE,),
        read=JsonReader((OPEN,), closing=CLOSE, call_of=call_of),
        written=Written(
            f"{OPEN}[\n    ",
            f"\n]{CLOSE}",
            f'{{"tool_call_id": "{ID}", "tool_name": {QUOTED}, "parameters": {ARGUMENTS}}}',
            between_calls=",\n    ",
        ),
        ends_thought=(OPEN,),
        recognizes=recognizes,
    )


COHERE4 = _action("cohere_command4", lambda template: OPEN in template and TEXT in template)
COHERE3 = _action("cohere_command3", lambda template: OPEN in template)
COHERE_FENCE = ToolFormat(
    "cohere_command_r",
    markers=(ACTION,),
    read=read_action,
    written=Written(
        f"{ACTION}\n{FENCE}\n[\n",
        f"\n]{FENCE_END}",
        f'    {{\n        "tool_name": {QUOTED},\n        "parameters": {ARGUMENTS}\n    }}',
        between_calls=",\n",
    ),
    recognizes=lambda template: f"{ACTION}\\n{FENCE}" in template and '"tool_name"' in template,
)
