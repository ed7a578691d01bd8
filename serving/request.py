"""One request inside the engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from onnxport.kv.table import BlockTable
from onnxport.serving.outputs import FinishReason, RequestMetrics
from onnxport.serving.params import SamplingParams
from onnxport.serving.text import TextStream

TOKEN_ID_TYPECODE = "q"  # 64 bits: the contract's int64, so tokens are copied without converting


class Request:
    """The state of one accepted request; belongs to the engine's thread.

    All that is left to compute is `num_new = num_tokens - num_computed_tokens`: prefill, a chunk
    of it, decoding one token and starting over after a preemption are the same.

    Attributes:
        tokens: the prompt and every token sampled so far, int64.
        num_computed_tokens: leading tokens whose K/V are in the cache.
        max_total_tokens: `len(tokens)` at which the request ends with "length".
        table: the KV blocks of `tokens[:num_computed_tokens]`, and of a step in flight.
        text: turns tokens into text and finds stop strings; None without a tokenizer.
        finish_reason: None until the request ends; set once.
    """

    __slots__ = (
        "arrival_time_s",
        "finish_reason",
        "finished_time_s",
        "first_token_time_s",
        "max_total_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "plain",
        "prompt",
        "request_id",
        "seed",
        "stop_token_ids",
        "table",
        "text",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_total_tokens: int,
        stop_token_ids: frozenset[int],
        seed: int,
        arrival_time_s: float,
        text: TextStream | None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.plain = params.greedy and params.logprobs is None
        self.tokens = array(TOKEN_ID_TYPECODE, prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.max_total_tokens = max_total_tokens
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.table = BlockTable()
        self.text = text
        self.finish_reason: FinishReason | None = None
        self.arrival_time_s = arrival_time_s
        self.first_token_time_s: float | None = None
        self.finished_time_s: float | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self.tokens[: self.num_prompt_tokens])

    @property
    def metrics(self) -> RequestMetrics:
        """The request's times so far."""
        return RequestMetrics(self.arrival_time_s, self.first_token_time_s, self.finished_time_s)
