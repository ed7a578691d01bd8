"""`<TOOLCALL>[{"name": …, "arguments": {…}}]</TOOLCALL>`: Nemotron Nano v2.

Nemotron 3 writes what Qwen3-Coder does. Source: the models' chat templates.
"""

from __future__ import annotations

from onnxport.serving.http.tool_formats.base import ToolFormat, Written
from onnxport.serving.http.tool_formats.json_calls import JsonReader
from onnxport.serving.thoughts import Enclosed

OPEN, CLOSE = "<TOOLCALL>", "</TOOLCALL>"

NEMOTRON = ToolFormat(
    "nemotron_json",
    markers=(OPEN,),
    further=(CLOSE,),
    read=JsonReader((OPEN,), closing=CLOSE),
    written=Written(f"{OPEN}[", f"]{CLOSE}", between_calls=", "),
    ends_thought_with=(Enclosed(OPEN, "[", CLOSE),),
    recognizes=lambda template: f"{OPEN}[" in template,
)
