"""`<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>`: Hunyuan A13B, Apriel 1.5 and 1.6.

Text may stand on both sides. Source: the models' chat templates.
"""

from __future__ import annotations

from onnxport.serving.http.tool_formats.base import ToolFormat, Written
from onnxport.serving.http.tool_formats.json_calls import JsonReader
from onnxport.serving.thoughts import Enclosed

OPEN, CLOSE = "<tool_calls>", "</tool_calls>"

HUNYUAN = ToolFormat(
    "hunyuan_a13b",
    markers=(OPEN,),
    further=(CLOSE,),
    read=JsonReader((OPEN,), closing=CLOSE),
    written=Written(f"{OPEN}[", f"]{CLOSE}", between_calls=", "),
    ends_thought_with=(Enclosed(OPEN, "[", CLOSE),),
    recognizes=lambda template: f"{OPEN}[" in template,
)
