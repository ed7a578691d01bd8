"""`[{"name": …, "arguments": {…}}]`, and nothing else: xLAM 2.

A fence of JSON may be around it. Source: the models' chat templates.
"""

from __future__ import annotations

from onnxport.serving.http.tool_formats.base import ToolFormat, Written
from onnxport.serving.http.tool_formats.json_calls import JsonReader

FENCE, FENCE_END = "```json", "```"

XLAM = ToolFormat(
    "xlam",
    markers=(FENCE,),
    begins=lambda functions: ("[",),
    read=JsonReader((FENCE,), closing=FENCE_END),
    written=Written("[", "]", between_calls=", "),
    recognizes=lambda template: "make calls in a single JSON array" in template,
)
