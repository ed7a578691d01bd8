"""What a tool format reads of a text that comes in pieces."""

from __future__ import annotations

from typing import Any

from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import ParsedCall, ToolFormat


def parsed(
    functions: dict[str, Any], syntax: ToolFormat, *pieces: str
) -> tuple[str, list[ParsedCall]]:
    """All content, and all calls, in order."""
    parser = ToolCallParser(functions, syntax)
    found = [*map(parser.feed, pieces), parser.finish()]
    return "".join(each.content for each in found), [call for each in found for call in each.calls]
