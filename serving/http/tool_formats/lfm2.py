"""`<|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>`: LFM2 and LFM2.5.

Text may stand on both sides. Between the markers is what `pythonic` reads, or calls in JSON, which
the models write where they are told to. Templates of LFM2 put tools between markers, and those of
LFM2.5 behind words alone. Source: the models' cards and chat templates.
"""

from __future__ import annotations

from onnxport.serving.called_messages import END, START, is_lfm2
from onnxport.serving.http.tool_formats.base import PYTHON_LITERALS, ToolFormat, Written
from onnxport.serving.http.tool_formats.pythonic import PythonicReader

LFM2 = ToolFormat(
    "lfm2",
    markers=(START,),
    further=(END,),
    read=PythonicReader(START, END),
    written=Written(f"{START}[", f"]{END}", between_calls=", "),
    literals=PYTHON_LITERALS,
    recognizes=is_lfm2,
)
