"""What `/completion` and `/infill` answer, by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxport.serving.http.generation import Job, Usage
from onnxport.serving.http.llama_prompts import Prompted
from onnxport.serving.http.llama_request import LlamaBody
from onnxport.serving.http.llama_settings import choose, generation_settings
from onnxport.serving.http.logprobs import completion_probabilities
from onnxport.serving.http.service import Service
from onnxport.serving.outputs import CompletionDelta, TokenLogprobs


class Answer:
    """One completion of one prompt.

    Attributes:
        usage: what it has cost.
        text: all of it so far.
        reason: why it ended, as `finish_reason`; None: it goes on.
        stop: by what, as `stop_reason`.
    """

    def __init__(
        self, service: Service, job: Job, body: LlamaBody, index: int, prompt: Prompted
    ) -> None:
        self._service, self._body, self._index, self._prompt = service, body, index, prompt
        self._params, self._options = job.params, job.options
        self.usage = Usage(Job([prompt.token_ids], job.params, job.options, job.id))
        self.text = ""
        self.reason: str | None = None
        self.stop: int | str | None = None

    def add(self, delta: CompletionDelta) -> None:
        """Take what is told of it."""
        self.usage.add(0, delta)
        self.reason, self.stop = delta.finish_reason, delta.stop_reason
        if self._body.only_prompt:  # a token was generated that nobody asked for
            self.usage.completion_tokens = 0
        else:
            self.text += delta.text

    def piece(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[tuple[int, TokenLogprobs]]
    ) -> dict[str, Any]:
        """Return what every event has."""
        more: dict[str, Any] = {}
        if logprobs:
            more["completion_probabilities"] = completion_probabilities(
                self._service.tokenizer, logprobs, self._params.logprobs or 0
            )
        if self._body.timings_per_token:
            more["timings"] = self.usage.timings()
        return {
            "index": self._index,
            "content": text,
            "tokens": list(token_ids) if self._body.return_tokens else [],
            "stop": False,
            "tokens_predicted": self.usage.completion_tokens,
            "tokens_evaluated": self.usage.prompt_tokens,
            **more,
        }

    def whole(self, piece: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is told at the end, or what the request wants of it.

        Args:
            piece: the last one, or all there is.
        """
        stop = self.stop
        word = stop if isinstance(stop, str) and self.reason == "stop" else ""
        kind = "word" if word else "eos" if self.reason == "stop" else "limit"
        settings = generation_settings(self._params, stream=bool(self._body.stream))
        if limits := self._body.line_limits:
            settings["n_indent"] = limits.indent
            settings["t_max_predict_ms"] = self._body.t_max_predict_ms
        if self._body.only_prompt:
            kind, word = "limit", ""
            settings |= {"n_predict": 0, "max_tokens": 0}
        answer = {
            **piece,
            "stop": True,
            "model": self._options.adapter or self._service.model_name,
            "prompt": self._told_prompt(),
            "generation_settings": settings,
            "stop_type": kind,
            "stopping_word": word,
            "has_new_line": "\n" in self.text,
            "truncated": self._prompt.is_cut,
            "tokens_cached": sum(self.usage.cached.values()),
            "timings": self.usage.timings(),
        }
        return choose(answer, self._body.response_fields or ())

    def _told_prompt(self) -> str:
        told = self._prompt
        if told.text is not None:
            return told.text
        return self._service.tokenizer.decode(told.token_ids, skip_special_tokens=False)
