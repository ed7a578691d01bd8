"""What `LLM` makes of prompts besides texts: vectors, labels, and scores of pairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from onnxport.errors import RequestError
from onnxport.serving.classifying import NO_CLASSES, ranked
from onnxport.serving.collect import Collector, PooledCollector
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RankedDocument,
    ScoringOutput,
    ScoringRequestOutput,
)
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import PoolingParams
from onnxport.serving.prompts import Prompt, one_for_each, text_or_ids
from onnxport.serving.request import Request
from onnxport.serving.truncation import check_truncation

if TYPE_CHECKING:
    from onnxport.serving.scoring import Pair, PairParams, PairPlan


class PoolingMethods(ABC):
    """The methods; whoever has them has an engine, and runs requests."""

    _engine: Engine

    @abstractmethod
    def _next_id(self) -> str:
        """Return a name for a request."""

    @abstractmethod
    def _run_into(
        self, collectors: Mapping[str, Collector], requests: Sequence[Request], *, use_tqdm: bool
    ) -> None:
        """Run the requests to their ends."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """Make a vector of every prompt; the outputs are in the order of the prompts.

        All requests are checked before any is run. One that fails while it runs says why in its
        output; the others go on.

        Args:
            prompts: see `generate`.
            pooling_params: for all prompts, or one for each; None: all numbers, as the model says.
            options: see `generate`.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: the model was not loaded to embed (`embeddings`), or as `generate`.
            CapacityError: a prompt does not fit the context or the KV cache.
        """
        one = isinstance(prompts, str | Mapping)
        listed = [cast(Prompt, prompts)] if one else list(cast("Sequence[Prompt]", prompts))
        params = one_for_each(pooling_params, PoolingParams(), len(listed), "pooling_params")
        treated = one_for_each(options, RequestOptions(), len(listed), "options")
        requests = [
            self._engine.prepare_embedding(self._next_id(), text_or_ids(prompt), each, how)
            for prompt, each, how in zip(listed, params, treated, strict=True)
        ]
        return [one.embedding() for one in self._pool(requests, use_tqdm=use_tqdm)]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = True,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        use_tqdm: bool = False,
    ) -> list[ClassificationRequestOutput]:
        """Say how probable each label of every prompt is; see `embed`.

        Args:
            prompts: see `generate`.
            use_activation: tell probabilities, and not what the score head gives.
            options: see `generate`.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: the model has no score head, or as `generate`.
            CapacityError: a prompt does not fit the context or the KV cache.
        """
        classifier = self._engine.classifier
        if classifier is None:
            raise RequestError(NO_CLASSES)
        one = isinstance(prompts, str | Mapping)
        listed = [cast(Prompt, prompts)] if one else list(cast("Sequence[Prompt]", prompts))
        treated = one_for_each(options, RequestOptions(), len(listed), "options")
        requests = [
            self._engine.prepare_classification(
                self._next_id(), text_or_ids(prompt), how, activated=use_activation
            )
            for prompt, how in zip(listed, treated, strict=True)
        ]
        pooled = self._pool(requests, use_tqdm=use_tqdm)
        return [one.classification(classifier.labels) for one in pooled]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        options: RequestOptions | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoringRequestOutput]:
        """Say how well texts go together: what a score head says of both, or how near vectors are.

        Args:
            text_1: a text, or as many as `text_2` has.
            text_2: a text, or several.
            instruction: of the score template; None: what that has itself.
            use_activation: tell probabilities, and not what the score head gives.
            truncate_prompt_tokens: leave out the end of `text_2` (of each text, where each has a
                vector), so that a prompt has no more tokens; -1: than there is room for. None:
                nothing is left out.
            options: how all are treated.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: the model neither has a score head of one label nor embeds, or there are
                not as many texts of both.
            CapacityError: a pair does not fit the context or the KV cache.
        """
        from onnxport.serving.scoring import PairParams

        first, second = _texts(text_1, "text_1"), _texts(text_2, "text_2")
        if len(first) not in (1, len(second)) or not second:
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; give one and any number, "
                "or as many of both",
                "text_1",
            )
        pairs = list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))
        params = PairParams(instruction, use_activation, self._most(truncate_prompt_tokens))
        return self._score(pairs, params, options, use_tqdm=use_tqdm)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        options: RequestOptions | None = None,
        use_tqdm: bool = False,
    ) -> list[RankedDocument]:
        """Return documents by how well they go with a query, the best first; see `score`.

        Where each text has a vector, the model's prompts for queries and documents go ahead.

        Args:
            query: a text.
            documents: texts.
            top_n: how many; None: all.
            instruction: see `score`.
            use_activation: see `score`.
            truncate_prompt_tokens: see `score`.
            options: see `score`.
            use_tqdm: see `score`.

        Raises:
            RequestError: as `score`; `documents` is no list; `top_n` is below 1; one could not be
                scored, which says why.
            CapacityError: as `score`.
        """
        from onnxport.serving.scoring import OF_DOCUMENTS, OF_QUERIES, PairParams

        if top_n is not None and top_n < 1:
            raise RequestError(f"top_n is {top_n}; give 1 or more", "top_n")
        if isinstance(documents, str):
            raise RequestError(
                "documents is a text; give a list of texts, or use score for one pair", "documents"
            )
        most, sides = self._most(truncate_prompt_tokens), (OF_QUERIES, OF_DOCUMENTS)
        params = PairParams(instruction, use_activation, most, sides=sides)
        documents = _texts(documents, "documents")
        [query] = _texts([query], "query")
        pairs = [(query, document) for document in documents]
        found = self._score(pairs, params, options, use_tqdm=use_tqdm)
        failed = next((one.outputs.error for one in found if one.outputs.error), None)
        if failed is not None:
            raise RequestError(f"a document could not be scored: {failed}")
        scores = [one.outputs.score for one in found]
        return [RankedDocument(at, documents[at], scores[at]) for at in ranked(scores, top_n)]

    def _most(self, num_tokens: int | None) -> int | None:
        """Return how many tokens a prompt may have before it is cut."""
        check_truncation(num_tokens)
        return self._engine.capabilities.max_model_len if num_tokens == -1 else num_tokens

    def _score(
        self,
        pairs: Sequence[Pair],
        params: PairParams,
        options: RequestOptions | None,
        *,
        use_tqdm: bool,
    ) -> list[ScoringRequestOutput]:
        from onnxport.serving.scoring import PairPlanner

        engine = self._engine
        if engine.tokenizer is None:
            raise RequestError("pairs of texts need a tokenizer, and this model has none")
        planner = PairPlanner(
            engine.tokenizer,
            engine.embedder,
            engine.classifier,
            engine.capabilities.max_model_len,
        )
        plan = planner.plan(pairs, params)
        requests = []
        for prompt in plan.prompts:
            name = self._next_id()
            if plan.classifies:
                activated = params.activated
                made = engine.prepare_classification(name, prompt, options, activated=activated)
            else:
                made = engine.prepare_embedding(name, prompt, None, options)
            requests.append(made)
        pooled = self._pool(requests, use_tqdm=use_tqdm)
        return [_scored(plan, pair, pooled) for pair in range(len(pairs))]

    def _pool(self, requests: Sequence[Request], *, use_tqdm: bool) -> list[PooledCollector]:
        """Run requests to their ends; return what was made of each."""
        collectors = {request.request_id: PooledCollector(request) for request in requests}
        self._run_into(collectors, requests, use_tqdm=use_tqdm)
        return list(collectors.values())


def _texts(given: str | Sequence[str], name: str) -> list[str]:
    """Return a text, or several, as a list. Raises RequestError for what is no text."""
    listed = [given] if isinstance(given, str) else list(given)
    wrong = next((one for one in listed if not isinstance(one, str)), None)
    if wrong is not None:
        raise RequestError(f"{name} has {wrong!r:.80}, which is no text; give texts", name)
    return listed


def _scored(plan: PairPlan, pair: int, pooled: Sequence[PooledCollector]) -> ScoringRequestOutput:
    """Return what became of a pair."""
    parts = [pooled[number] for number in plan.prompts_of(pair)]
    vectors = [part.vector for part in parts if part.vector is not None]
    error = next((part.error for part in parts if part.error is not None), None)
    whole = len(vectors) == len(parts)
    return ScoringRequestOutput(
        request_id=parts[0].request.request_id,
        prompt_token_ids=tuple(one for part in parts for one in part.request.prompt_token_ids),
        outputs=ScoringOutput(plan.score(pair, vectors) if whole else float("nan"), error),
        finished=all(part.finished for part in parts),
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
    )
