"""`<|tool_call|>[{"name": …, "arguments": {…}}]`: Granite 3; also behind `<tool_call>`.

Granite 4 writes what Hermes does. Source: the models' chat templates and vLLM's notes on them.
"""

from __future__ import annotations

from onnxport.serving.http.tool_formats.base import ToolFormat, Written
from onnxport.serving.http.tool_formats.json_calls import JsonReader

TOKEN, TEXT = "<|tool_call|>", "<tool_call>"
ROLE = "<|start_of_role|>"


def _granite(opening: str, other: str) -> ToolFormat:
    """Return the format of the versions that write `opening`; the other one is read, too."""
    return ToolFormat(
        "granite",
        markers=(TOKEN, TEXT),
        read=JsonReader((TOKEN, TEXT)),
        written=Written(f"{opening}[", "]", between_calls=", "),
        recognizes=lambda template: (
            ROLE in template
            and "</tool_call>" not in template
            and (opening in template or other not in template)
        ),
    )


GRANITE_TOKEN, GRANITE_TEXT = _granite(TOKEN, TEXT), _granite(TEXT, TOKEN)
