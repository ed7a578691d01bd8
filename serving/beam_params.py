"""Beam search as vLLM's offline API has it: its parameters, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxport.errors import RequestError
from onnxport.serving.outputs import FinishReason, RequestOutput, TokenLogprobs
from onnxport.serving.param_ranges import MAX_COMPLETIONS
from onnxport.serving.params import SamplingParams


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How texts are looked for, with vLLM's names, defaults and order.

    Attributes:
        beam_width: how many beams there are, and texts are returned.
        max_tokens: most tokens of an output.
        ignore_eos: go on past the model's end tokens.
        temperature: log probabilities are of logits divided by it; 0 leaves them as they are.
        length_penalty: see `SamplingParams`.
        include_stop_str_in_output: keep the text of the end token.

    Raises:
        RequestError: a value is out of its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        width = self.beam_width
        if not isinstance(width, int) or isinstance(width, bool) or width not in WIDTHS:
            raise RequestError(
                f"beam_width is {width!r}; it must be an integer in [1, {MAX_COMPLETIONS}]",
                "beam_width",
            )
        if self.max_tokens is None:
            raise RequestError("max_tokens is None; a beam search needs a limit", "max_tokens")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """Return the same as the engine takes it, with the log probabilities of the tokens."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=0,
            n=self.beam_width,
            include_stop_str_in_output=self.include_stop_str_in_output,
            use_beam_search=True,
            length_penalty=self.length_penalty,
        )


WIDTHS = range(1, MAX_COMPLETIONS + 1)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A text that was found."""

    tokens: tuple[int, ...]  # prompt and output, as in vLLM
    logprobs: tuple[TokenLogprobs, ...]  # of the output's tokens, by the model's own softmax
    cum_logprob: float  # the sum over the output of what texts are compared by; -inf: it failed
    text: str  # of the output alone
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    error: str | None = None  # why finish_reason is "error"


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What a beam search found for one prompt."""

    sequences: tuple[BeamSearchSequence, ...]  # the best first

    @classmethod
    def of(cls, output: RequestOutput) -> BeamSearchOutput:
        """Return it, of the completions that the engine made of `BeamSearchParams.sampling`."""
        sequences = [
            BeamSearchSequence(
                (*output.prompt_token_ids, *one.token_ids),
                one.logprobs or (),
                -math.inf if one.cumulative_logprob is None else one.cumulative_logprob,
                one.text,
                one.finish_reason,
                one.stop_reason,
                one.error,
            )
            for one in output.outputs
        ]
        return cls(tuple(sequences))
