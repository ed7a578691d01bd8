"""Qwen3-Reranker in GGUF files: two rows of its head, and a text with places for a pair.

llama.cpp scores a pair with the softmax of the logits of "yes" and "no", of which it takes the
first. That is a sigmoid of their difference, so a score head of one row, as `classification` has.
"""

from __future__ import annotations

import json
import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.classification import SCORE_TENSOR
from onnxport.exporter.gguf.common import Values
from onnxport.exporter.gguf.facts import Facts
from onnxport.exporter.gguf.layouts import SCORE_ROWS

RANK: Final = 4  # of `pooling_type`
POOLING: Final = "pooling_type"
PLACES: Final = ("{query}", "{document}")  # in the text of a pair

_LABELS: Final = "classifier.output_labels"
_PLACES: Final = re.compile(r"\{(query|document)\}")  # of PLACES
_ROLES: Final = """\
{%- set roles = namespace(query="", document="") -%}
{%- for message in messages -%}
{%- if message.role == "query" %}{% set roles.query = message.content %}{% endif -%}
{%- if message.role == "document" %}{% set roles.document = message.content %}{% endif -%}
{%- endfor -%}
"""


def is_reranker(facts: Facts) -> bool:
    """Whether the file holds a model that judges pairs."""
    return facts.metadata.get(POOLING, int, 0) == RANK


def labels(facts: Facts) -> Values:
    """The keys of `config.json` of a Qwen3 that judges pairs.

    Raises:
        CheckpointError: There are no two rows of a head.
        UnsupportedModelError: It tells other than two labels.
    """
    meta = facts.metadata
    told = meta.get(_LABELS, list, [])
    if len(told) != 2:
        raise UnsupportedModelError(
            f"{meta.path}: {meta.name(_LABELS)} is {told!r}; supported are two, of which the first "
            "is that of a pair that fits. Export the original checkpoint."
        )
    shape = facts.shapes.get(SCORE_ROWS, ())
    if shape[:1] != (2,):
        raise CheckpointError(
            f"{meta.path}: {SCORE_ROWS} is {list(shape)}, expected a row for each of {told!r}. "
            "Download it again."
        )
    return {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": str(told[0])}}


def score_head(facts: Facts) -> dict[str, NDArray[np.float32]]:
    """The score head, float32 [1, hidden], by the name that other checkpoints have for it."""
    if not is_reranker(facts):
        return {}
    first, second = np.asarray(facts.numbers(SCORE_ROWS), np.float32).reshape(2, -1)
    return {SCORE_TENSOR: (first - second)[None]}


def pair_template(text: str) -> str:
    """A template of pairs, see `score_templates`, of a text with {query} and {document}."""
    parts = _PLACES.split(text)  # texts and places take turns
    written = [
        f"roles.{part}" if place % 2 else json.dumps(part, ensure_ascii=False)
        for place, part in enumerate(parts)
        if part
    ]
    return _ROLES + "{{- " + " ~ ".join(written) + " -}}\n"
