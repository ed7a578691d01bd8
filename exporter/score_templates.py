"""How models that are known write a pair of a query and a document, in Jinja.

Templates are given messages of the roles `query` and `document`, and one of the role `system` with
an instruction, where a request has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

QWEN3_RERANKER: Final = "qwen3-reranker"

# The prompt of Qwen3-Reranker's model card, without which its answers mean little.
_QWEN3_RERANKER: Final = """\
{%- set roles = namespace(
    instruct="Given a web search query, retrieve relevant passages that answer the query",
    query="", document="") -%}
{%- for message in messages -%}
{%- if message.role == "system" %}{% set roles.instruct = message.content %}{% endif -%}
{%- if message.role == "query" %}{% set roles.query = message.content %}{% endif -%}
{%- if message.role == "document" %}{% set roles.document = message.content %}{% endif -%}
{%- endfor -%}
{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and '
    ~ 'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n'
    ~ '<|im_start|>user\\n'
    ~ '<Instruct>: ' ~ roles.instruct ~ '\\n'
    ~ '<Query>: ' ~ roles.query ~ '\\n'
    ~ '<Document>: ' ~ roles.document ~ '<|im_end|>\\n'
    ~ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}
"""

TEMPLATES: Final[Mapping[str, str]] = {QWEN3_RERANKER: _QWEN3_RERANKER}
