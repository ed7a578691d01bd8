"""Scores of pairs of texts: what a score head says of both, or how near their vectors are."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CapacityError, OnnxportError, RequestError
from onnxport.graphs.embedding_spec import Similarity
from onnxport.serving.classifying import Classifier, check_scores, similarity
from onnxport.serving.pairs import INSTRUCTION, PairEncoder, PairTokenizer, beginning, fitted
from onnxport.serving.pooling import Embedder
from onnxport.serving.request import TOKEN_ID_TYPECODE

# Names of sentence-transformers' prompts, the first that a model has goes ahead of a text.
OF_QUERIES: Final = ("query",)
OF_DOCUMENTS: Final = ("document", "passage", "corpus")
# Likewise of two texts of which neither is a query: the model's default prompt.
OF_EQUALS: Final[tuple[str, ...]] = ()

Floats = NDArray[np.float32]
Pair = tuple[str, str]


class StoppedError(OnnxportError):
    """Nobody waits for the prompts of pairs any more, so that the rest of them was not made."""


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class PairParams:
    """How pairs are scored.

    Attributes:
        instruction: of a score template; None: what that has itself.
        activated: whether scores are probabilities, and not what the score head gives.
        most_tokens: of a prompt, for which the end of a document is left out; None: nothing is.
        most_of_document: tokens of a document, likewise.
        most_of_query: tokens of a query, likewise.
        variables: of a score template, besides the instruction.
        sides: where each text has a vector, the names of prompts that go ahead of the first one of
            a pair, and of the second.

    Raises:
        RequestError: a number of tokens is below 1.
    """

    instruction: str | None = None
    activated: bool = True
    most_tokens: int | None = None
    most_of_document: int | None = None
    sides: tuple[tuple[str, ...], tuple[str, ...]] = (OF_EQUALS, OF_EQUALS)
    most_of_query: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("most_tokens", "most_of_document", "most_of_query"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise RequestError(f"{name} is {value!r}; give a whole number above 0", name)


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The prompts of pairs, and how what is made of them becomes scores.

    Attributes:
        prompts: token ids, of pairs or of texts; in arrays, as there may be millions.
        places: of each pair the numbers of its texts among the prompts, which are embedded; None:
            prompts are of pairs, in their order, and are classified.
        similarity: of vectors.
    """

    prompts: list[array[int]]
    places: list[tuple[int, int]] | None = None
    similarity: Similarity = "cosine"

    @property
    def classifies(self) -> bool:
        """Whether a score head reads the prompts."""
        return self.places is None

    def prompts_of(self, pair: int) -> tuple[int, ...]:
        """Return the numbers of the prompts that a pair has."""
        return (pair,) if self.places is None else self.places[pair]

    def score(self, pair: int, vectors: Sequence[Floats]) -> float:
        """Return the score of a pair.

        Args:
            pair: its number.
            vectors: of all its prompts, float32 [1] of a score head.
        """
        if self.places is None:
            return float(vectors[0][0])
        return similarity(self.similarity, vectors[0], vectors[1])

    def scores(self, vectors: Sequence[Floats]) -> list[float]:
        """Return the score of each pair, of what was made of all prompts."""
        count = len(self.prompts) if self.places is None else len(self.places)
        return [
            self.score(pair, [vectors[number] for number in self.prompts_of(pair)])
            for pair in range(count)
        ]


@dataclass(frozen=True, slots=True)
class PairPlanner:
    """Makes prompts of pairs, for what a model can do.

    Attributes:
        tokenizer: of the model.
        embedder: how it embeds; None: it does not.
        classifier: how it classifies; None: it does not. One score goes before vectors.
        max_model_len: the longest prompt.
        most_of_all: tokens that all prompts may have together; None: any number.
    """

    tokenizer: PairTokenizer
    embedder: Embedder | None
    classifier: Classifier | None
    max_model_len: int
    most_of_all: int | None = None

    @property
    def compares_vectors(self) -> bool:
        """Whether each text has a vector."""
        judges = self.classifier is not None and self.classifier.scores
        return self.embedder is not None and not judges

    def num_prompts(self, pairs: Sequence[Pair]) -> int:
        """Return how many prompts pairs have: a text that is there twice has one vector."""
        return len(_texts(pairs)) if self.compares_vectors else len(pairs)

    def plan(
        self,
        pairs: Sequence[Pair],
        params: PairParams,
        is_stopped: Callable[[], bool] = _never,
    ) -> PairPlan:
        """Return the prompts of pairs. The first one that is too long is the last one made.

        Args:
            pairs: of texts.
            params: how they are scored.
            is_stopped: whether nobody waits any more, which is asked ahead of each prompt.

        Raises:
            RequestError: the model does not compare texts, or not as it is asked to.
            CapacityError: a prompt is too long, or all of them together are.
            StoppedError: nobody waits any more.
        """
        if self.embedder is not None and self.compares_vectors:
            return self._of_vectors(self.embedder, pairs, params, is_stopped)
        classifier = check_scores(self.classifier)
        encoder = PairEncoder(
            self.tokenizer, classifier.template, self.max_model_len, params.variables
        )
        encoder.check(params.instruction)
        encode = partial(
            encoder.encode,
            instruction=params.instruction,
            most_tokens=params.most_tokens,
            most_of_document=params.most_of_document,
        )
        begun: dict[str, str] = {}  # each query is cut once

        def make(query: str, document: str) -> list[int]:
            if params.most_of_query is not None and query not in begun:
                begun[query] = beginning(self.tokenizer, query, params.most_of_query)
            return encode(begun.get(query, query), document)

        return PairPlan(self._prompts((partial(make, *pair) for pair in pairs), is_stopped))

    def _of_vectors(
        self,
        embedder: Embedder,
        pairs: Sequence[Pair],
        params: PairParams,
        is_stopped: Callable[[], bool],
    ) -> PairPlan:
        """Each text has a vector."""
        for given, name in (
            (params.instruction, INSTRUCTION),
            (params.variables or None, "chat_template_kwargs"),
        ):
            if given is not None:
                raise RequestError(
                    f"{name} was given, and this model compares vectors of texts, which have none; "
                    "write what is asked for ahead of the query, or leave it out",
                    name,
                )
        if not params.activated:
            raise RequestError(
                "probabilities were declined, and this model compares vectors, of which none are "
                "made; leave that out",
                "use_activation",
            )
        ahead = [embedder.prompt_of(*names) for names in params.sides]
        most = params.most_tokens
        if most is not None and embedder.max_tokens is not None:
            most = min(most, embedder.max_tokens)
        texts = _texts(pairs)

        def make(side: int, text: str) -> list[int]:
            most_of_text = params.most_of_document if side else params.most_of_query
            if most is None and most_of_text is None:
                self.tokenizer.check_length(text, self.max_model_len)
            write = partial(_encode, self.tokenizer, ahead[side])
            found = fitted(self.tokenizer, text, write, most, most_of_text)
            embedder.check_tokens(len(found))
            return found

        prompts = self._prompts((partial(make, *text) for text in texts), is_stopped)
        numbers = {text: number for number, text in enumerate(texts)}
        places = [(numbers[0, first], numbers[1, second]) for first, second in pairs]
        return PairPlan(prompts, places, embedder.similarity)

    def _prompts(
        self, makes: Iterable[Callable[[], list[int]]], is_stopped: Callable[[], bool]
    ) -> list[array[int]]:
        """Make each prompt, as long as there is room and somebody waits."""
        prompts: list[array[int]] = []
        total = 0
        for make in makes:
            if is_stopped():
                raise StoppedError("the request was ended while its prompts were made")
            prompt = make()
            if len(prompt) > self.max_model_len:
                raise CapacityError(
                    f"a prompt has {len(prompt)} prompt tokens, and the context length is "
                    f"{self.max_model_len} tokens; shorten its texts, or let their ends be left "
                    "out with truncate_prompt_tokens -1"
                )
            total += len(prompt)
            if self.most_of_all is not None and total > self.most_of_all:
                raise CapacityError(
                    f"the first {len(prompts) + 1} prompts have {total} tokens, and one request "
                    f"may have {self.most_of_all} in all of its prompts; send the texts in several "
                    "requests"
                )
            prompts.append(array(TOKEN_ID_TYPECODE, prompt))
        return prompts


def _texts(pairs: Sequence[Pair]) -> list[tuple[int, str]]:
    """Return each side and text that there is, once, in their order."""
    return list(dict.fromkeys((side, text) for pair in pairs for side, text in enumerate(pair)))


def _encode(tokenizer: PairTokenizer, ahead: str, text: str) -> list[int]:
    return tokenizer.encode(ahead + text)
