"""Classifying: what a score head makes of a text, or of a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.graphs.classification_spec import (
    SCORE_TEMPLATE_FILE,
    Activation,
    read_score_head,
)
from onnxport.serving.pooling import Embedder, Pooler, PoolingParams, Rows

if TYPE_CHECKING:
    from onnxport.graphs.artifact import Artifact
    from onnxport.serving.pairs import PairTemplate

Floats = NDArray[np.float32]

NO_CLASSES: Final = (
    "this model has no score head and classifies nothing; export one that has, or name the tokens "
    "that judge with --classifier-from-token"
)
NO_SCORES: Final = (
    "this server compares no texts, for the model has no score head; export one that has, name the "
    "tokens that judge with --classifier-from-token, or compare vectors, with --embeddings "
    "(LLM(embeddings=True))"
)
_LAST: Final = Embedder("last", normalized=False)  # what the head reads, as it is


@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    """How a model classifies.

    Attributes:
        labels: of its numbers.
        activation: what makes probabilities of what the head gives.
        weight: of the head, float64 [labels, hidden].
        template: how a pair of texts is written; None: one behind the other.
        generates: whether the model has another head, so that it can generate as well.
    """

    labels: tuple[str, ...]
    activation: Activation
    weight: NDArray[np.float64] = field(repr=False)
    template: PairTemplate | None = field(default=None, repr=False)
    generates: bool = True

    @classmethod
    def of(cls, artifact: Artifact, template: Path | None = None) -> Self | None:
        """Return how an artifact's model classifies; None: it does not.

        Args:
            artifact: what was exported.
            template: a file that says how pairs are written; None: as the artifact has it.

        Raises:
            ArtifactError: a file of the artifact is not what it should be.
            RequestError: the template cannot be read, or is not valid.
        """
        spec = artifact.manifest.classification
        if spec is None:
            return None
        from onnxport.serving.pairs import PairTemplate

        hidden = artifact.manifest.model.hidden_size
        weight = read_score_head(artifact.path, spec, hidden).astype(np.float64)
        path = template
        if path is None and (artifact.path / SCORE_TEMPLATE_FILE).is_file():
            path = artifact.path / SCORE_TEMPLATE_FILE
        pairs = None if path is None else PairTemplate.read(path, artifact.path)
        return cls(spec.labels, spec.activation, weight, pairs, generates=not spec.only)

    @property
    def scores(self) -> bool:
        """Whether it says one thing of a text, by which pairs can be compared."""
        return len(self.labels) == 1

    def judge(self, state: Floats, *, activated: bool) -> Floats:
        """Return the number of each label, float32 [labels].

        Args:
            state: what the final norm makes of the last token, float32 [hidden].
            activated: whether these are probabilities, and not what the head gives.
        """
        found: Floats = self.judge_each(state[None], activated=activated)[0]
        return found

    def judge_each(self, states: Floats, *, activated: bool) -> Floats:
        """Return the number of each label for each of some tokens, float32 [num_tokens, labels].

        Args:
            states: what the final norm makes of the tokens, float32 [num_tokens, hidden].
            activated: see `judge`.
        """
        # One by one: what becomes of a token does not depend on how many there are.
        found = np.stack([self.weight @ state for state in states.astype(np.float64)])
        if activated and self.activation == "sigmoid":
            # exp of what is not positive: neither branch overflows.
            small = np.exp(-np.abs(found))
            found = np.where(found >= 0, 1 / (1 + small), small / (1 + small))
        elif activated and self.activation != "none":
            parts = np.exp(found - found.max(axis=1, keepdims=True))
            found = parts / parts.sum(axis=1, keepdims=True)
        numbers: Floats = found.astype(np.float32)
        return numbers


class ClassPooler:
    """What a score head makes of one prompt, while its tokens are computed; see `Pooler`."""

    __slots__ = ("_judge", "_pooler", "_rows")

    def __init__(
        self, classifier: Classifier, num_tokens: int, *, activated: bool, per_token: bool = False
    ) -> None:
        """Begin without any.

        Args:
            classifier: how the model classifies.
            num_tokens: of the prompt.
            activated: see `Classifier.judge`.
            per_token: whether each token is judged, and not the last one.
        """
        self._judge = partial(classifier.judge_each, activated=activated)
        self._pooler = Pooler(_LAST, PoolingParams(), num_tokens)
        self._rows = Rows(self._judge) if per_token else None

    def read(self, first: int, states: Floats) -> None:
        """Read what the model has made of tokens; see `Pooler.read`."""
        (self._rows or self._pooler).read(first, states)

    def vector(self) -> Floats | None:
        """Return the number of each label, float32 [labels]; None: one is not finite.

        Those of each token are a row of [num_tokens, labels].
        """
        if self._rows is not None:
            return self._rows.found()
        state = self._pooler.vector()
        if state is None:
            return None
        with np.errstate(all="ignore"):  # of numbers beyond float32
            [found] = self._judge(state[None])
        return found if np.isfinite(found).all() else None


def similarity(kind: str, first: Floats, second: Floats) -> float:
    """Return how near two vectors are, as sentence-transformers has it.

    Args:
        kind: "cosine" or "dot"; "euclidean" or "manhattan" distances are negative.
        first: float32 [dimensions].
        second: likewise.
    """
    one, other = first.astype(np.float64), second.astype(np.float64)
    if kind == "euclidean":
        return -float(np.linalg.norm(one - other))
    if kind == "manhattan":
        return -float(np.abs(one - other).sum())
    product = float(one @ other)
    if kind == "dot":
        return product
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return product / lengths if lengths else 0.0


def check_scores(classifier: Classifier | None) -> Classifier:
    """Return a classifier by which pairs can be compared.

    Raises:
        RequestError: there is none, or it has several labels.
    """
    if classifier is None:
        raise RequestError(NO_SCORES)
    if not classifier.scores:
        raise RequestError(
            f"this model has {len(classifier.labels)} labels, and pairs are compared by one score; "
            "send texts to /classify (LLM.classify)"
        )
    return classifier


def ranked(scores: Sequence[float], top_n: int | None) -> list[int]:
    """Return the numbers of the best, the best first; of those that are equal the first first."""
    order = sorted(range(len(scores)), key=lambda number: -scores[number])
    return order[:top_n]
