"""One sequence of a request inside the engine."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnxport.graphs.contract import NO_SUMMARY
from onnxport.kv.prefix import KeyChain
from onnxport.kv.states import NO_TOKENS, Kept
from onnxport.kv.table import BlockTable
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.adapting import Feedback, feedback
from onnxport.serving.classifying import ClassPooler
from onnxport.serving.config import LogprobsMode
from onnxport.serving.grammar import Grammar
from onnxport.serving.infill_sampler import InfillRule
from onnxport.serving.outputs import FinishReason, RequestMetrics
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import Pooler
from onnxport.serving.row_params import (
    NOTHING_LEFT_OUT,
    Adapting,
    RowParams,
    Thinning,
    exact_allowed,
    exact_logits,
    summary_scale,
)
from onnxport.serving.rules import LogitRules, SequenceRules
from onnxport.serving.sampler import RowLogprobs
from onnxport.serving.stuck import Repetition
from onnxport.serving.text import TextStream

if TYPE_CHECKING:
    from onnxport.serving.beams import BeamGroup

TOKEN_ID_TYPECODE = "q"  # 64 bits: the contract's int64, so tokens are copied without converting


@dataclass(slots=True)
class RequestTimes:
    """When things happened, on `time.monotonic`'s clock; None: not yet."""

    arrival_s: float
    scheduled_s: float | None = None  # the first time
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None


class Request:
    """The state of one accepted sequence; belongs to the engine's thread.

    All that is left to compute is `num_new = num_tokens - num_computed_tokens`: prefill, a chunk
    of it, decoding one token and starting over after a preemption are the same.

    A request for `n` completions is `n` sequences. The first computes the prompt; the others wait
    in its `siblings` and fork from it when it samples its first token. Those of a beam search may
    fork again after each token, see `beams`; the ones without a beam wait there meanwhile.

    Attributes:
        index: which completion of the request.
        tokens: the prompt and every token sampled so far, int64.
        num_computed_tokens: leading tokens whose K/V are in the cache.
        num_owed_tokens: of those that follow how many are computed a second time, before the next
            one: a step has computed them with guesses that proved wrong, and the state behind these
            was of no use. The scheduler's own.
        num_cached_tokens: prompt tokens that were found in the cache at the first attempt.
        drafts: tokens that were guessed for it and checked, and how many of them were right; None:
            none were checked yet.
        max_total_tokens: `len(tokens)` at which the sequence ends with "length".
        table: the KV blocks of `tokens[:num_computed_tokens]`, and of a step in flight.
        state: the slot of the state after these tokens, `kv.states.NO_TOKENS` while there are none;
            that always of a model without states. The scheduler's own.
        keeps_state: whether steps leave the state that they read as it is, for one that did not has
            failed. The scheduler's own.
        kept: its latest state on its way that can be found, which the next one replaces; None:
            there is none. The scheduler's own.
        keys: names the content of the blocks; None without prefix caching.
        forked: whether the last block may be another sequence's too.
        running: whether it holds rows of the step; else it waits. The scheduler's own.
        rank: priority, then order of arrival: the last one yields first. The scheduler's own.
        tenant: whose turn it is served in. The scheduler's own.
        deadline_s: when the request ends unless it has before; infinite without a timeout.
        row: how its tokens are drawn, as far as that is the same for all of them.
        plain: whether its tokens are the likeliest of unchanged logits, and nothing else is asked.
        likeliest: whether its tokens are the likeliest that its grammar allows, or of all without
            one, of unchanged logits, and nothing else is asked.
        feedback: what its tokens say of how the next one is drawn; None: nothing.
        exact_logits: see `row_params.exact_logits`; the prompt's log probabilities are not counted.
        exact_allowed: see `row_params.exact_allowed`, likewise; 0 where it may get any token.
        per_unit: see `RowParams.per_unit`.
        allowed_words: which tokens it may get, whatever the grammar says; None: all. int32
            [mask_words(vocab)].
        summary_scale: what the model should tell of its logits; see `row_params.summary_scale`.
        rules: what changes in its logits; None: nothing.
        grammar: what its output has to follow; None: nothing.
        repetition: how its output repeats itself; None: nobody looks.
        scores: log probabilities of the prompt's tokens from its second on, as far as they are
            computed; None if nobody asked, or when they have been delivered.
        logprobs_mode: what log probabilities are of.
        adapter: its LoRA adapter; None: the model alone.
        adapter_start: the number of the first token that the adapter acts on, one of the prompt's;
            those before it are computed by the model alone, and no step has tokens of both.
        pooler: makes a vector of the prompt, or numbers of labels, and nothing is generated; None:
            tokens are.
        beams: the beam search that it is a slot of; None: none, its tokens are drawn.
        text: turns tokens into text and finds stop strings; None without a tokenizer.
        finish_reason: None until the sequence ends; set once.
    """

    __slots__ = (
        "adapter",
        "adapter_start",
        "allowed_words",
        "beams",
        "deadline_s",
        "drafts",
        "exact_allowed",
        "exact_logits",
        "feedback",
        "finish_reason",
        "forked",
        "grammar",
        "index",
        "keeps_state",
        "kept",
        "keys",
        "likeliest",
        "logprobs_mode",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_owed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "options",
        "params",
        "per_unit",
        "plain",
        "pooler",
        "prompt",
        "rank",
        "repetition",
        "request_id",
        "row",
        "rules",
        "running",
        "scores",
        "seed",
        "siblings",
        "state",
        "stop_token_ids",
        "summary_scale",
        "table",
        "tenant",
        "text",
        "times",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        tokens: array[int],
        params: SamplingParams,
        *,
        max_total_tokens: int,
        options: RequestOptions | None = None,
        index: int = 0,
        prompt: str | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        arrival_time_s: float = 0.0,
        keys: KeyChain | None = None,
        rules: LogitRules | None = None,
        grammar: Grammar | None = None,
        adapter: Adapter | None = None,
        adapter_start: int = 0,
        text: TextStream | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        infill: InfillRule | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.prompt = prompt
        self.params = params
        self.options = options or RequestOptions()
        self.row = _row(params)
        if not self.row.greedy and not params.mirostat:
            self.row = self.row._replace(infill=infill)
        self.feedback: Feedback | None = feedback(params)
        self.likeliest = self.row.greedy and self.row.num_logprobs is None and rules is None
        self.plain = self.likeliest and grammar is None
        lowered: int | None = 0
        if rules is not None:
            lowered = rules.most_lowered(len(tokens), max_total_tokens - len(tokens))
        self.allowed_words = None if rules is None else rules.allowed_words
        may_get_any = grammar is None and self.allowed_words is None
        self.per_unit = self.row.per_unit
        self.exact_logits = exact_logits(self.row, lowered) if may_get_any else 0
        self.exact_allowed = 0 if may_get_any else exact_allowed(self.row, lowered)
        self.summary_scale = summary_scale(
            self.row, is_edited=rules is not None, is_masked=grammar is not None
        )
        if params.use_beam_search:
            self.summary_scale = NO_SUMMARY
        self.rules = None if rules is None else SequenceRules(rules, len(tokens))
        self.grammar = grammar
        detection = params.repetition_detection
        self.repetition: Repetition | None = None
        if detection is not None and detection.is_on:
            self.repetition = Repetition(detection, len(tokens))
        self.tokens = tokens
        self.num_prompt_tokens = len(tokens)
        self.num_computed_tokens = 0
        self.num_owed_tokens = 0
        self.num_cached_tokens = 0
        self.drafts: tuple[int, int] | None = None
        self.num_preemptions = 0
        self.max_total_tokens = max_total_tokens
        self.stop_token_ids = stop_token_ids
        self.seed = seed
        self.logprobs_mode = logprobs_mode
        self.adapter = adapter
        self.adapter_start = adapter_start
        self.table = BlockTable()
        self.state = NO_TOKENS
        self.keeps_state = False
        self.kept: Kept | None = None
        self.keys = keys
        self.forked = False
        self.siblings: tuple[Request, ...] = ()
        self.pooler: Pooler | ClassPooler | None = None
        self.beams: BeamGroup | None = None
        self.running = False
        self.rank: tuple[int, int, int] = (0, 0, index)
        self.tenant = ""
        timeout_s = self.options.timeout_s
        self.deadline_s = math.inf if timeout_s is None else arrival_time_s + timeout_s
        self.scores: list[RowLogprobs] | None = None
        if params.prompt_logprobs is not None and index == 0:
            self.scores = []
        self.text = text
        self.finish_reason: FinishReason | None = None
        self.times = RequestTimes(arrival_time_s)

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens}/{len(self.tokens)}"
        return f"<Request {self.request_id}-{self.index} {progress}>"

    @property
    def num_rows(self) -> int:
        """Rows of a step that it needs, now or when its siblings fork from it."""
        return 1 + len(self.siblings)

    @property
    def decodes(self) -> bool:
        """Whether the last token is to compute, of a request that runs, and what it owes."""
        return len(self.tokens) - self.num_computed_tokens == 1 + self.num_owed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def scores_missing(self) -> bool:
        """Whether log probabilities of the prompt have still to be computed."""
        return self.scores is not None and len(self.scores) < self.num_prompt_tokens - 1

    def name_blocks(self, block_size: int) -> None:
        """Name the content of the blocks anew where these are of `block_size` now."""
        if self.keys is not None:
            self.keys = self.keys.for_block_size(block_size)
            self.keys.extend(self.tokens)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(self.tokens[: self.num_prompt_tokens])

    @property
    def metrics(self) -> RequestMetrics:
        """The request's times so far."""
        times = self.times
        return RequestMetrics(
            times.arrival_s,
            times.scheduled_s,
            times.first_token_s,
            times.last_token_s,
            times.finished_s,
        )


def _row(params: SamplingParams) -> RowParams:
    """Return how the tokens of a request are drawn; for beams all logits count, and none is."""
    if params.use_beam_search:
        return RowParams(num_logprobs=0)
    if params.mirostat:
        adapting = None if params.greedy else Adapting(mirostat=params.mirostat)
        row = RowParams(params.temperature, num_logprobs=params.num_logprobs)
        return row._replace(adapting=adapting)
    row = RowParams(
        params.temperature,
        params.top_k,
        params.top_p,
        num_logprobs=params.num_logprobs,
        min_p=params.min_p,
        thinning=_thinning(params),
    )
    if params.greedy:
        return row
    row = row._replace(target=params.adaptive_target)
    reach = params.dynatemp_range
    if reach == 0.0:
        return row
    adapting = Adapting(max(0.0, params.temperature - reach), params.dynatemp_exponent)
    return row._replace(temperature=params.temperature + reach, adapting=adapting)


def _thinning(params: SamplingParams) -> Thinning | None:
    """Return what leaves tokens out at every position, or may; None: nothing."""
    threshold = params.xtc_threshold if params.xtc_probability > 0.0 else NOTHING_LEFT_OUT
    thinning = Thinning(params.top_n_sigma, params.typical_p, threshold)
    return None if params.greedy or thinning == Thinning() else thinning
