"""What `AsyncEngine` makes of prompts besides texts: vectors and labels."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence

from onnxport.serving.classifying import Classifier
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import Embedder, PoolingParams
from onnxport.serving.request import Request


class AsyncPoolingMethods(ABC):
    """The methods; whoever has them has an engine, and streams what it makes of requests."""

    _engine: Engine

    @abstractmethod
    def _check_open(self, request_id: str, options: RequestOptions | None) -> None:
        """Raise what `stream` raises where no such request can be taken now."""

    @abstractmethod
    def _stream(self, request: Request) -> AsyncGenerator[CompletionDelta, None]:
        """Return a generator that runs a request."""

    def embed(
        self,
        prompt: str | Sequence[int],
        params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Check a prompt that is to be embedded now; return a generator of its one delta.

        It is queued, aborted and refused as with `stream`.

        Args:
            prompt: text or token ids.
            params: how to embed; None for the defaults.
            request_id: names the request; None makes a unique name.
            options: how to treat it; None for the defaults.

        Raises:
            RequestError: the engine embeds nothing, or as `stream`.
            CapacityError, OverloadedError, DeviceLostError, OnnxportError: as `stream`.
        """
        request_id = request_id or f"embd-{uuid.uuid4().hex}"
        self._check_open(request_id, options)
        return self._stream(self._engine.prepare_embedding(request_id, prompt, params, options))

    @property
    def embedder(self) -> Embedder | None:
        """How prompts are embedded; None: none are."""
        return self._engine.embedder

    def classify(
        self,
        prompt: str | Sequence[int],
        request_id: str | None = None,
        options: RequestOptions | None = None,
        *,
        activated: bool = True,
        per_token: bool = False,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Check a prompt that is to be classified now; return a generator of its one delta.

        It is queued, aborted and refused as with `stream`.

        Args:
            prompt: text or token ids.
            request_id: names the request; None makes a unique name.
            options: how to treat it; None for the defaults.
            activated: whether its numbers are probabilities, and not what the score head gives.
            per_token: whether each token has such numbers.

        Raises:
            RequestError: the model has no score head, or as `stream`.
            CapacityError, OverloadedError, DeviceLostError, OnnxportError: as `stream`.
        """
        request_id = request_id or f"classify-{uuid.uuid4().hex}"
        self._check_open(request_id, options)
        return self._stream(
            self._engine.prepare_classification(
                request_id, prompt, options, activated=activated, per_token=per_token
            )
        )

    @property
    def classifier(self) -> Classifier | None:
        """How prompts are classified; None: none are."""
        return self._engine.classifier
