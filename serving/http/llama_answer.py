"""What `/completion` and `/infill` answer, by llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from onnxport.errors import RequestError
from onnxport.serving.http.job import Job, Usage
from onnxport.serving.http.llama_prompts import Prompted
from onnxport.serving.http.llama_request import LlamaBody
from onnxport.serving.http.llama_settings import choose, generation_settings
from onnxport.serving.http.logprobs import completion_probabilities, drawn
from onnxport.serving.http.service import Service
from onnxport.serving.http.timings import prompt_progress
from onnxport.serving.limits import longest_total
from onnxport.serving.outputs import CompletionDelta, TokenLogprobs
from onnxport.serving.params import SamplingParams

MOST_TOLD_BIASES: Final = 1 << 18  # in all answers of a request, each of which tells all of them
ANY_SLOT: Final = -1  # as `id_slot` of requests has it; there are none here
_BIASES: Final = ("generation_settings", "generation_settings/logit_bias")  # names of fields


def settings_told(body: LlamaBody, params: SamplingParams, num_answers: int) -> dict[str, Any]:
    """Return `generation_settings`, which all answers of a request share.

    Args:
        body: of the request.
        params: what is made of it.
        num_answers: that tell it.

    Raises:
        RequestError: biases would be told too many times.
    """
    num_biases = len(params.logit_bias)
    names = body.response_fields
    tells = not names or any(name in _BIASES for name in names)
    if tells and num_answers > 1 and num_answers * num_biases > MOST_TOLD_BIASES:
        raise RequestError(
            f"{num_answers} answers would tell {num_biases} biases each, and together they may "
            f"tell {MOST_TOLD_BIASES}; ask for fewer answers, have fewer tokens in logit_bias, or "
            "name other fields than generation_settings in response_fields",
            "logit_bias",
        )
    settings = generation_settings(params, stream=bool(body.stream))
    settings["lora"] = [one.model_dump() for one in body.lora or ()]
    if limits := body.line_limits:
        settings["n_indent"] = limits.indent
        settings["t_max_predict_ms"] = body.t_max_predict_ms
    if body.only_prompt:
        settings |= {"n_predict": 0, "max_tokens": 0}
    return settings


class Answer:
    """One completion of one prompt.

    Attributes:
        usage: what it has cost.
        text: all of it so far.
        reason: why it ended, as `finish_reason`; None: it goes on.
        stop: by what, as `stop_reason`.
    """

    def __init__(
        self,
        service: Service,
        job: Job,
        body: LlamaBody,
        settings: Mapping[str, Any],
        index: int,
        prompt: Prompted,
    ) -> None:
        """Begin one.

        Args:
            service: that answers.
            job: of the request.
            body: of the request.
            settings: see `settings_told`.
            index: among all answers.
            prompt: that it goes on with.
        """
        self._service, self._body, self._index, self._prompt = service, body, index, prompt
        self._settings = settings
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

    def progress(self, delta: CompletionDelta) -> dict[str, Any]:
        """Return how much of the prompt is computed, as a part of an event; {}: nothing is told."""
        return prompt_progress(delta, len(self._prompt.token_ids))

    def piece(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[tuple[int, TokenLogprobs]]
    ) -> dict[str, Any]:
        """Return what every event has."""
        more: dict[str, Any] = {}
        if logprobs:
            more["completion_probabilities"] = self._probabilities(logprobs)
        if self._body.timings_per_token:
            more["timings"] = self.usage.timings()
        return {
            "index": self._index,
            "content": text,
            "tokens": list(token_ids) if self._body.return_tokens or self._body.stream else [],
            "stop": False,
            "id_slot": ANY_SLOT if self._body.id_slot is None else self._body.id_slot,
            "tokens_predicted": self.usage.completion_tokens,
            "tokens_evaluated": self.usage.prompt_tokens,
            **more,
        }

    def _probabilities(self, logprobs: Sequence[tuple[int, TokenLogprobs]]) -> list[dict[str, Any]]:
        """Return `completion_probabilities` of tokens."""
        tokenizer, top = self._service.tokenizer, self._params.logprobs or 0
        told = completion_probabilities(tokenizer, logprobs, top)
        return drawn(told, self._params) if self._body.post_sampling_probs else told

    def whole(self, piece: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is told at the end, or what the request wants of it.

        Args:
            piece: the last one, or all there is.
        """
        stop = self.stop
        word = stop if isinstance(stop, str) and self.reason == "stop" else ""
        kind = "word" if word else "eos" if self.reason == "stop" else "limit"
        if self._body.only_prompt:
            kind, word = "limit", ""
        answer = {
            **piece,
            "stop": True,
            "model": self._options.adapter or self._service.model_name,
            "prompt": self._told_prompt(),
            "generation_settings": self._settings,
            "stop_type": kind,
            "stopping_word": word,
            "has_new_line": "\n" in self.text,
            "truncated": self._prompt.is_cut or (kind == "limit" and self._fills_context),
            "tokens_cached": sum(self.usage.cached.values()),
            "timings": self.usage.timings(),
        }
        return choose(answer, self._body.response_fields or ())

    @property
    def _fills_context(self) -> bool:
        """Whether there is no room for another token, in the context or in the whole KV cache."""
        length = self.usage.prompt_tokens + self.usage.completion_tokens
        return length >= longest_total(self._service.engine.capabilities)

    def _told_prompt(self) -> str:
        told = self._prompt
        if told.text is not None:
            return told.text
        return self._service.tokenizer.decode(told.token_ids, skip_special_tokens=False)
