"""`{"name": …, "parameters": {…}}`: Llama 3.1, 3.2 and 3.3.

The text is the call, or several with `;` between them; `<|python_tag|>` may come before. Source:
the models' chat templates and Meta's description of their prompts.
"""

from __future__ import annotations

from onnxport.serving.http.tool_formats.base import ARGUMENTS, QUOTED, ToolFormat, Written
from onnxport.serving.http.tool_formats.json_calls import JsonReader

TAG = "<|python_tag|>"

LLAMA3_JSON = ToolFormat(
    "llama3_json",
    markers=(TAG,),
    begins=lambda functions: ("{",),
    goes_on=(";", "{"),
    read=JsonReader((TAG,), separator=";"),
    written=Written(
        "",
        "",
        f'{{"name": {QUOTED}, "parameters": {ARGUMENTS}}}',
        between_calls="; ",
        optional_marker=TAG,
    ),
    recognizes=lambda template: TAG in template or '"parameters": dictionary of' in template,
)
