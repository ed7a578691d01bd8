"""What a caller gets back: frozen results, in the shapes of vLLM's offline API."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "repetition", "abort", "error", "timeout"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
CUT: tuple[FinishReason, ...] = ("length", "repetition")  # the model would have gone on


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence ended with "error"."""

    message: str
    refused: bool = False  # the request itself is to blame: sent again, it would fail again

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure of a request that an error, which is not its fault, has ended."""
        return cls(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one candidate token at one position."""

    # Natural logarithm, after the model's softmax, before sampling parameters, unless the engine's
    # `logprobs_mode` says otherwise.
    logprob: float
    rank: int  # 1 is the likeliest token of the vocabulary
    decoded_token: str


TokenLogprobs = Mapping[int, Logprob]  # token id -> Logprob; always holds the sampled token


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a request; everything that was generated so far."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None  # one entry a token, None unless asked for
    finish_reason: FinishReason | None  # None while it runs
    stop_reason: int | str | None = None  # the stop token or stop string; of a repetition vLLM's
    error: str | None = None  # why finish_reason is "error"
    # Of a beam search, the sum over its tokens of what texts are compared by; else None.
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request in seconds, all on `time.monotonic`'s clock."""

    arrival_time_s: float
    scheduled_time_s: float | None = None  # when its first step began
    first_token_time_s: float | None = None
    last_token_time_s: float | None = None
    finished_time_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int  # prompt tokens whose K/V were not computed for this request
    metrics: RequestMetrics
    # One entry a prompt token, None for the first and where no prompt_logprobs were asked for.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[Any]  # numbers of float32, or a list of each token's; none where it failed
    error: str | None = None  # why it failed


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What became of a prompt that was to be embedded."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: EmbeddingOutput
    finished: bool
    num_cached_tokens: int  # prompt tokens whose K/V were not computed for this request
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """What a score head makes of a prompt."""

    probs: list[float]  # of each label, numbers of float32; none where it failed
    label: str | None = None  # of the largest
    error: str | None = None  # why it failed

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """What became of a prompt that was to be classified."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: tuple[int, ...]
    outputs: ClassificationOutput
    finished: bool
    num_cached_tokens: int  # prompt tokens whose K/V were not computed for this request
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float  # nan where it failed
    error: str | None = None  # why it failed


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """What became of a pair of texts."""

    request_id: str
    prompt_token_ids: tuple[int, ...]  # of both texts, where each has a vector
    outputs: ScoringOutput
    finished: bool
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document and how well it goes with a query."""

    index: int  # among those that were given
    document: str
    relevance_score: float


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How much of a prompt is computed."""

    num_computed: int  # tokens, those that were cached among them
    elapsed_s: float  # since the first step of the request began


@dataclass(slots=True)
class CompletionDelta:
    """What one engine step added to one sequence; the unit of streaming. Not to be changed.

    It is not frozen because one is made for every token, and that would take more than twice as
    long.
    """

    request_id: str
    index: int  # which completion of the request; 0 unless n > 1
    text: str  # new text; may be empty while a multi-byte character or stop string is pending
    token_ids: tuple[int, ...]  # new tokens
    logprobs: tuple[TokenLogprobs, ...] | None  # one entry a new token, None unless asked for
    finish_reason: FinishReason | None  # set exactly once, on the last delta
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0  # prompt tokens whose K/V were not computed for this request
    failure: Failure | None = None  # why finish_reason is "error"
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # with the first token of 0
    # When the first step began, and when the first and the last token came; None: none has come.
    times: tuple[float, float, float] | None = field(default=None, compare=False)
    # Tokens that were guessed ahead and checked so far, and how many of them were right; None: none
    # were checked.
    drafts: tuple[int, int] | None = field(default=None, compare=False)
    # Of a beam search, on the last delta, which is the only one; -inf: there are fewer texts than
    # were asked for, and this one is not. Else None.
    cumulative_logprob: float | None = None
    # Of a prompt that is embedded, on the last delta, which is the only one: float32 [dimensions].
    # Of one that is classified float32 [labels].
    embedding: NDArray[np.float32] | None = field(default=None, compare=False)
    # Of a prompt that is being computed, where it was asked for: there are no tokens then.
    progress: PromptProgress | None = field(default=None, compare=False)

    @property
    def is_missing(self) -> bool:
        """Whether it ends what is no completion: a beam search found fewer than were asked for."""
        return self.cumulative_logprob == -math.inf

    @property
    def error(self) -> str | None:
        """What happened, where finish_reason is "error"."""
        return None if self.failure is None else self.failure.message
