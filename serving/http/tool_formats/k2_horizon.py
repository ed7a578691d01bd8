"""K2 Horizon's calls, which are GLM's in tags of other names, with a pair around all.

    <ifm|tool_calls>
    <ifm|tool_call>f
    <ifm|arg_key>a</ifm|arg_key>
    <ifm|arg_type>integer</ifm|arg_type>
    <ifm|arg_value>1</ifm|arg_value>
    </ifm|tool_call>
    </ifm|tool_calls>

The type stands there where the chat template is told `tool_call_format: "xml_typed"`; with "json" a
call is `{"name": …, "arguments": {…}}` in its tags. Source: what vLLM reads of the model.
"""

from __future__ import annotations

from typing import Final

from onnxport.serving.http.tool_formats.tag_sections import sectioned
from onnxport.serving.http.tool_formats.xml_calls import Tags

SECTION, CALL, KEY, KIND, VALUE = (
    (f"<ifm|{name}>", f"</ifm|{name}>")
    for name in ("tool_calls", "tool_call", "arg_key", "arg_type", "arg_value")
)
TAGS: Final = Tags(CALL, ("", ""), KEY, VALUE, kind=KIND)

K2_HORIZON = sectioned(
    "k2_horizon", SECTION, TAGS, lambda template: SECTION[0] in template and KEY[0] in template
)
