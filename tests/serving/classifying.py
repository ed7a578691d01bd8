"""Prompts that the null model classifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.chat import DEFAULT, ChatTemplate
from onnxport.serving.classifying import Classifier
from onnxport.serving.engine import Engine
from onnxport.serving.pairs import PairTemplate
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import Embedder
from tests.serving.pooling import vector

Floats = NDArray[np.float32]
WEIGHT = np.random.default_rng(5).standard_normal((3, 8))
THREE = Classifier(("bad", "fair", "good"), "softmax", WEIGHT)
ONE = Classifier(("yes",), "sigmoid", WEIGHT[:1])
TEMPLATE = PairTemplate(
    ChatTemplate(
        {
            DEFAULT: "{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]"
            "{% elif m.role == 'query' %}{{ m.content }}?{% else %} {{ m.content }}."
            "{% endif %}{% endfor %}"
        }
    )
)
PAIRS = Classifier(("yes",), "sigmoid", WEIGHT[:1], TEMPLATE)


def classify(engine: Engine, name: str, prompt: str | Sequence[int], **options: Any) -> None:
    activated = options.pop("activated", True)
    treated = RequestOptions(**options)
    engine.submit(engine.prepare_classification(name, prompt, treated, activated=activated))


def judged(prompt: Sequence[int], classifier: Classifier, *, activated: bool = True) -> Floats:
    """What a head makes of the null model's last state, of a prompt that is alone."""
    state = vector(prompt, Embedder("last", normalized=False))
    return classifier.judge(state, activated=activated)
