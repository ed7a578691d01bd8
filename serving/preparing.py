"""What `Engine` makes of prompts before it takes them: checked requests, which hold nothing yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxport.serving.classifying import Classifier
from onnxport.serving.intake import Intake
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import Embedder, PoolingParams
from onnxport.serving.request import Request
from onnxport.serving.structured.cache import GrammarCompiler
from onnxport.serving.structured.compiler import CompiledGrammar


class Preparing:
    """The methods; whoever has them has an intake, and a clock for times of arrival."""

    _intake: Intake
    _clock: Callable[[], float]

    @property
    def grammars(self) -> GrammarCompiler | None:
        """Compiles what requests ask of their output; None without a tokenizer."""
        return self._intake.grammars

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: RequestOptions | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """Tokenize and check a request; schedules nothing. Safe to call from any thread.

        Args:
            request_id: names the request; unique among the unfinished ones.
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            params: how to decode.
            options: how to treat it; None for the defaults.
            grammar: of its `structured_outputs`; None: it is compiled, and waited for.

        Raises:
            RequestError: the prompt is empty or holds a token that the model does not know, the
                request needs text and there is no tokenizer, it asks for more completions than
                run at once, for a priority where there are none, or for an adapter that is not
                loaded (UnknownAdapterError).
            CapacityError: prompt and max_tokens, of all beams of a beam search together, do not fit
                the context or the KV cache.
        """
        options = options or RequestOptions()
        return self._intake.request(request_id, prompt, params, options, self._clock, grammar)

    @property
    def embedder(self) -> Embedder | None:
        """How prompts are embedded; None: none are."""
        return self._intake.embedder

    def prepare_embedding(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: PoolingParams | None = None,
        options: RequestOptions | None = None,
    ) -> Request:
        """Tokenize and check a prompt that is to be embedded; schedules nothing. From any thread.

        Its only delta has the vector (`CompletionDelta.embedding`), or says why there is none.

        Args:
            request_id: names the request; unique among the unfinished ones.
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            params: how to embed; None for the defaults.
            options: how to treat it; None for the defaults.

        Raises:
            RequestError: the engine embeds nothing, the vector cannot be cut as is asked, or as
                `prepare`.
            CapacityError: the prompt does not fit the context or the KV cache.
        """
        params, options = params or PoolingParams(), options or RequestOptions()
        return self._intake.embedding(request_id, prompt, params, options, self._clock)

    @property
    def classifier(self) -> Classifier | None:
        """How prompts are classified; None: none are."""
        return self._intake.classifier

    def prepare_classification(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        options: RequestOptions | None = None,
        *,
        activated: bool = True,
        per_token: bool = False,
    ) -> Request:
        """Tokenize and check a prompt that is to be classified; schedules nothing. From any thread.

        Its only delta has the number of each label (`CompletionDelta.embedding`), or says why there
        is none.

        Args:
            request_id: names the request; unique among the unfinished ones.
            prompt: text, to which the tokenizer adds its special tokens, or token ids.
            options: how to treat it; None for the defaults.
            activated: whether the numbers are probabilities, and not what the score head gives.
            per_token: whether each token has such numbers, [num_tokens, labels].

        Raises:
            RequestError: the model has no score head, or as `prepare`.
            CapacityError: the prompt does not fit the context or the KV cache.
        """
        options = options or RequestOptions()
        return self._intake.classification(
            request_id, prompt, options, self._clock, activated=activated, per_token=per_token
        )
