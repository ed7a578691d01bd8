"""Joining the deltas of one request into its output."""

from __future__ import annotations

from onnxport.serving.outputs import (
    CompletionDelta,
    CompletionOutput,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
)
from onnxport.serving.request import Request


class OutputCollector:
    """Joins the deltas of one request, in order, into a `RequestOutput`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._num_cached_tokens = 0
        self._error: str | None = None

    def add(self, delta: CompletionDelta) -> None:
        """Take the next delta."""
        assert self._finish_reason is None, f"{delta.request_id}: a delta after the last one"
        self._text.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        if self._logprobs is not None:
            self._logprobs.extend(delta.logprobs or ())
        self._finish_reason = delta.finish_reason
        self._stop_reason = delta.stop_reason
        self._num_cached_tokens = delta.num_cached_tokens
        self._error = delta.error

    def output(self) -> RequestOutput:
        """Return everything so far."""
        completion = CompletionOutput(
            index=0,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._request.prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=(completion,),
            finished=self._finish_reason is not None,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._request.metrics,
        )
