"""Calls in JSON, each in tags of its own: InternLM 2.5 and 3, LongCat Flash, Granite 20B.

    <|action_start|><|plugin|>             <longcat_tool_call>           <function_call> {"name": …,
    {"name": …, "parameters": {…}}         {"name": …, "arguments": {…}} "arguments": {…}}
    <|action_end|>                         </longcat_tool_call>

Text may stand on both sides. Source: the templates that vLLM gives to the first and the last, and
what it reads of the second.
"""

from __future__ import annotations

from typing import Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    BREAK,
    JSON_CALL,
    QUOTED,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.json_calls import JsonReader

ACTION: Final = ("<|action_start|>", "<|action_end|>")
PLUGIN: Final = "<|plugin|>"
LONGCAT_CALL: Final = ("<longcat_tool_call>", "</longcat_tool_call>")
FUNCTION_CALL: Final = "<function_call>"


def _tagged_json(
    name: str, written: Written, sign: str, tokens: tuple[str, ...] = (), closing: str | None = None
) -> ToolFormat:
    """Return the format of templates with a sign, whose calls stand behind `written.opening`."""
    opening = written.opening.replace(BREAK, "").strip()
    return ToolFormat(
        name,
        markers=(opening,),
        further=tokens,
        read=JsonReader((opening,), closing=closing),
        written=written,
        recognizes=lambda template: sign in template,
    )


INTERNLM = _tagged_json(
    "internlm",
    Written(
        f"{ACTION[0]}{PLUGIN}{BREAK}",
        f"{BREAK}{ACTION[1]}",
        f'{{"name": {QUOTED}, "parameters": {ARGUMENTS}}}',
        between_blocks=BREAK,
    ),
    PLUGIN,
    (*ACTION, PLUGIN),
    ACTION[1],
)
LONGCAT = _tagged_json(
    "longcat",
    Written(f"{LONGCAT_CALL[0]}{BREAK}", f"{BREAK}{LONGCAT_CALL[1]}", between_blocks=BREAK),
    LONGCAT_CALL[0],
    LONGCAT_CALL[1:],
    LONGCAT_CALL[1],
)
GRANITE_20B = _tagged_json(
    "granite-20b-fc",
    Written(f"{FUNCTION_CALL} ", "", JSON_CALL, between_blocks=BREAK),
    f"{FUNCTION_CALL} {{",
)
