"""`<|tool_call|>[{"name": …, "arguments": {…}}]<|/tool_call|>`, or `functools[…]`: Phi-4-mini.

The model card has the first; templates that vLLM and others give to the model ask for the second.
What stands between may be one object, too.
"""

from __future__ import annotations

from onnxport.serving.http.tool_formats.base import ToolFormat, Written
from onnxport.serving.http.tool_formats.json_calls import JsonReader

OPEN, CLOSE, WORD = "<|tool_call|>", "<|/tool_call|>", "functools"


def _phi4_mini(written: Written, sign: str) -> ToolFormat:
    """Return the format of templates with a sign; both ways are read."""
    return ToolFormat(
        "phi4_mini_json",
        markers=(OPEN, WORD),
        further=(CLOSE,),
        read=JsonReader((OPEN, WORD), closing=CLOSE),
        written=written,
        recognizes=lambda template: sign in template,
    )


PHI4_MINI_WORD = _phi4_mini(Written(f"{WORD}[", "]", between_calls=", "), f"{WORD}[")
PHI4_MINI_TOKEN = _phi4_mini(Written(f"{OPEN}[", f"]{CLOSE}", between_calls=", "), "<|/tool|>")
