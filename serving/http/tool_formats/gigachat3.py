"""A message of the role `function call`, or `<|function_call|>`, then JSON: GigaChat 3, 3.1.

There is one call. Source: the models' chat templates.
"""

from __future__ import annotations

from typing import Final

from onnxport.serving.http.tool_formats.base import ToolFormat, Written
from onnxport.serving.http.tool_formats.json_calls import JsonReader

MESSAGE, ROLE, TOKEN = "<|message_sep|>", "<|role_sep|>", "<|function_call|>"
HEADER: Final = f"function call{ROLE}"
MARKERS: Final = (f"{MESSAGE}\n\n{HEADER}", HEADER, TOKEN)


def _gigachat(opening: str, signs: tuple[str, ...]) -> ToolFormat:
    """Return the format of the version that writes `opening`; the other one is read, too."""
    return ToolFormat(
        "gigachat3",
        markers=MARKERS,
        further=(MESSAGE, ROLE),
        read=JsonReader(MARKERS, closing=MESSAGE),
        written=Written(opening, ""),
        recognizes=lambda template: all(sign in template for sign in signs),
    )


GIGACHAT31 = _gigachat(TOKEN, (TOKEN, ROLE))
GIGACHAT3 = _gigachat(f"{MARKERS[0]}\n", ("function call", ROLE))
