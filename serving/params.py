"""How a request is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from onnxport.errors import RequestError
from onnxport.serving.param_checks import (
    check_integer,
    check_number,
    check_type,
    ids_of,
    texts_of,
)
from onnxport.serving.param_ranges import (
    MAX_COMPLETIONS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PRIORITY,
    MAX_SCALE,
    MAX_TIMEOUT_S,
    biases_of,
    breakers_of,
    check_adapting,
    check_beams,
    check_choices,
    check_left_out,
    check_penalties,
    check_repetitions,
    check_thinking,
)
from onnxport.serving.repetition import RepetitionDetection
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.thoughts import Thought

DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's
SWITCHES = (
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "skip_reading_prefix_cache",
    "use_beam_search",
    "infill",
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Decoding parameters of one request, with vLLM's names, defaults and order.

    Logits are changed in this order: `logit_bias` is added; what `allowed_token_ids`, `bad_words`
    and `min_tokens` forbid is made impossible; then come `repetition_penalty`,
    `frequency_penalty` and `presence_penalty`. Of the result the likeliest token is taken, or it
    is divided by `temperature`, thinned out by `top_n_sigma`, `min_p`, `top_k`, `typical_p`,
    `top_p` and XTC, each among what the one before left, and a token drawn. Log probabilities are
    of the logits before all that, unless the engine was told otherwise
    (`EngineConfig.logprobs_mode`). What DRY subtracts is a part of `logit_bias`. With `mirostat` it
    alone thins out what is divided by `temperature`.

    Sources: vLLM's `SamplingParams` and its V1 sampler; OpenAI's API reference (`logit_bias`,
    `presence_penalty`, `frequency_penalty`); Keskar et al., CTRL, 2019 (repetition); Nguyen et
    al., Min-p Sampling, 2024; llama.cpp's server (names and defaults of what follows); Tang et al.,
    Top-n-sigma, 2024; Meister et al., Locally Typical Sampling, 2022; p-e-w's XTC and DRY, 2024;
    Basu et al., Mirostat, 2021.

    Attributes:
        temperature: 0 decodes greedily; otherwise logits are divided by it.
        top_p: keep the likeliest tokens whose probabilities add up to at least this, in (0, 1].
        top_k: keep this many of the likeliest tokens; None keeps all.
        seed: makes the request's own tokens reproducible, whatever else is in the batch.
        stop: strings that end the text; the first that appears is cut off.
        stop_token_ids: tokens that end the text, besides the model's own end tokens.
        ignore_eos: go on past the model's end tokens (not past `stop_token_ids`).
        max_tokens: most tokens to generate; None generates up to the context length.
        logprobs: how many of the likeliest tokens to report at each position; 0 reports the
            sampled token alone, None reports nothing, -1 all tokens. The engine has a limit,
            `max_logprobs`.
        prompt_logprobs: likewise at each position of the prompt but its first; it is computed as a
            whole then, without the prefix cache.
        logprob_token_ids: tokens whose log probabilities are reported at each position of the
            output, whatever is sampled there: beside the likeliest of `logprobs`, which is 0 where
            it was not given. An empty list is none.
        n: how many completions of the prompt to return; they share its K/V.
        best_of: how many to generate, of which those with the highest log probability per token
            are returned; None: `n`.
        min_p: keep tokens at least this fraction as probable as the likeliest; 0 keeps all.
        repetition_penalty: of tokens in prompt or output, positive logits are divided by it and
            negative ones multiplied; above 1 discourages repetition.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted from them as often as they are there.
        logit_bias: token id to what is added to its logit; kept as pairs, in the order of ids. A
            token with -inf is never drawn.
        bad_words: texts that are not generated, alone or after a space: the last token of one is
            forbidden where the output ends in those before it.
        allowed_token_ids: the only tokens that may be generated; None allows all.
        min_tokens: end tokens, `stop_token_ids` and `stop` do not end the text before there are
            this many tokens.
        include_stop_str_in_output: keep the stop string, or the text of the stop token.
        skip_special_tokens: leave special tokens out of the text; false spells them out, but for
            the one that ends it.
        spelled_token_ids: special tokens that are spelled out all the same.
        structured_outputs: the form that the text has to have; None: any. The text ends where the
            form is complete, whatever `ignore_eos` says.
        thinking_token_budget: most tokens that reasoning has behind what opens it; where it is
            still open then, the tokens that close it come next, whatever logits say, and then the
            answer. A character that is begun is ended first. None and -1 set no limit.
        thought: the reasoning that the output may begin with, which the budget is about; a chat
            knows it by its template.
        top_n_sigma: keep logits at most this many standard deviations, of those that may come,
            below the largest; 0, or -1, keeps all.
        typical_p: keep the tokens whose surprise is nearest to what is expected of it, until their
            probabilities add up to at least this, in (0, 1].
        xtc_probability: how often, by chance, the likeliest choices are left out: of tokens at
            least as probable as `xtc_threshold`, all but the least likely one.
        xtc_threshold: see `xtc_probability`; above 0.5 it changes nothing.
        dry_multiplier: with others than 0, a token that would go on with a repetition of so many
            tokens has `dry_multiplier * dry_base ** (tokens - dry_allowed_length)` subtracted from
            its logit; see `onnxport.serving.dry`.
        dry_base: see `dry_multiplier`.
        dry_allowed_length: tokens of the shortest repetition that is made less likely.
        dry_penalty_last_n: how many of the last tokens, of prompt and output, repetitions are
            looked for in; -1 all, 0 none.
        dry_sequence_breakers: texts; a token with one in it ends repetitions, and is not lowered.
        repeat_last_n: how many of the last tokens, of prompt and output, the three penalties
            count, as llama.cpp has it; -1 all, 0 none. None: of the prompt and the output
            `repetition_penalty` counts all, the other two all of the output.
        dynatemp_range: with others than 0 the temperature moves from `temperature` less this, at
            least 0, up to `temperature` and this: the further up, the less sure the model is; see
            `onnxport.serving.adapting`.
        dynatemp_exponent: the power of the share of the way; see there.
        mirostat: 1 or 2 keep the surprise of tokens near `mirostat_tau`, by the first or the second
            way of Mirostat; 0 does not. What else leaves tokens out, and `dynatemp_range`, say
            nothing then.
        mirostat_tau: how much tokens are to surprise, in bits.
        mirostat_eta: which part of what is missing to that each token makes up for.
        adaptive_target: keep the probability of tokens near this, in [0, 1], of what all else
            leaves: llama.cpp's sampler adaptive-p, see `onnxport.serving.adapting`. None, or a
            number below 0, does not. Greedy, or with `mirostat`, it says nothing.
        adaptive_decay: how much each token counts beside the next one, in [0, 0.99]; about
            1 / (1 - `adaptive_decay`) tokens count.
        repetition_detection: ends an output that repeats itself; None looks for nothing.
        skip_reading_prefix_cache: compute all of the prompt, whatever the prefix cache has of it;
            others may go on from what was computed.
        use_beam_search: look for the likeliest texts instead of drawing tokens, with `best_of`, or
            `n`, beams; see `onnxport.serving.beams`. Nothing is left to chance, so that there is no
            `seed` and none of what leaves tokens out; `temperature` flattens what texts are
            compared by, and 0 leaves it as it is.
        length_penalty: of texts of a beam search, the sum of log probabilities is divided by
            length ** length_penalty; above 0 long ones gain, below 0 short ones.
        infill: leave out, behind all else, what is too unsure to fill a gap with: llama.cpp's
            sampler of that name, see `onnxport.serving.infill_sampler`. Greedy, or with
            `mirostat`, it says nothing.

    Raises:
        RequestError: a value is out of its range; names the parameter.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    n: int = 1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spelled_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    best_of: int | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    thought: Thought | None = None
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    repeat_last_n: int | None = None
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float | None = None
    adaptive_decay: float = 0.9
    repetition_detection: RepetitionDetection | None = None
    skip_reading_prefix_cache: bool = False
    use_beam_search: bool = False
    length_penalty: float = 1.0
    infill: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", texts_of("stop", self.stop))
        object.__setattr__(self, "bad_words", texts_of("bad_words", self.bad_words))
        object.__setattr__(
            self, "stop_token_ids", ids_of("stop_token_ids", self.stop_token_ids or ())
        )
        object.__setattr__(
            self, "spelled_token_ids", ids_of("spelled_token_ids", self.spelled_token_ids)
        )
        if self.allowed_token_ids is not None:
            allowed = ids_of("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
        self._take_logprob_tokens()
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; give true or false", name)
        object.__setattr__(self, "n", 1 if self.n is None else self.n)
        if self.seed == -1:  # vLLM's way to say "any"
            object.__setattr__(self, "seed", None)
        if self.thinking_token_budget == -1:  # vLLM's way to say "no limit"
            object.__setattr__(self, "thinking_token_budget", None)
        if self.top_k in (0, -1):  # vLLM's and OpenAI clients' ways to say "all"
            object.__setattr__(self, "top_k", None)
        if self.top_n_sigma == -1:  # llama.cpp's way to say "all"
            object.__setattr__(self, "top_n_sigma", 0.0)
        check_number("temperature", self.temperature, 0.0, 100.0)
        check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_integer("top_k", self.top_k, 1, math.inf)
        check_integer("max_tokens", self.max_tokens, 1, math.inf)
        check_integer("logprobs", self.logprobs, -1, math.inf)
        check_integer("prompt_logprobs", self.prompt_logprobs, -1, math.inf)
        check_integer("seed", self.seed, -math.inf, math.inf)
        check_integer("n", self.n, 1, MAX_COMPLETIONS)
        check_integer("best_of", self.best_of, 1, MAX_COMPLETIONS)
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n}; generate at least as many "
                "completions as are returned",
                "best_of",
            )
        check_penalties(self)
        object.__setattr__(self, "logit_bias", biases_of(self.logit_bias))
        check_choices(self)
        check_left_out(self)
        check_repetitions(self)
        breakers = breakers_of(self.dry_sequence_breakers)
        object.__setattr__(self, "dry_sequence_breakers", breakers)
        check_adapting(self)
        if self.adaptive_target is not None and self.adaptive_target < 0.0:  # llama.cpp's "none"
            object.__setattr__(self, "adaptive_target", None)
        check_type("structured_outputs", self.structured_outputs, StructuredOutputs)
        check_type("repetition_detection", self.repetition_detection, RepetitionDetection)
        check_thinking(self)
        check_beams(self)

    def _take_logprob_tokens(self) -> None:
        """Check the tokens of `logprob_token_ids`, each of which counts once, and ask for them."""
        name = "logprob_token_ids"
        token_ids = () if self.logprob_token_ids is None else ids_of(name, self.logprob_token_ids)
        if len(token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise RequestError(
                f"{name} has {len(token_ids)} tokens; give at most {MAX_LOGPROB_TOKEN_IDS}", name
            )
        object.__setattr__(self, name, tuple(dict.fromkeys(token_ids)) or None)
        if token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)

    @property
    def num_sequences(self) -> int:
        """How many completions are generated."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """As `logprobs`, but 0 where they are needed to choose the best completions."""
        ranked = self.num_sequences > self.n and not self.use_beam_search
        return 0 if ranked and self.logprobs is None else self.logprobs

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        if self.mirostat:
            return self.temperature == 0.0
        return self.top_k == 1 or self.temperature + self.dynatemp_range == 0.0


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is treated, apart from its tokens.

    Attributes:
        priority: lower numbers go first (as in vLLM); refused unless the policy knows priorities.
        tenant: whose request it is; the "fair" policy shares between tenants.
        cache_salt: requests share cached K/V with requests of the same salt alone.
        adapter: the name of a loaded LoRA adapter, which changes the model for this request; None:
            `adapter_scales` say it.
        adapter_scales: loaded adapters, by name, and what each is times in the sum that changes the
            model; kept as pairs, in the order of names. None, with no `adapter`: what the engine
            has for all, which is the model alone unless it was told otherwise.
        timeout_s: seconds from arrival after which the request ends with "timeout"; of requests
            of one priority and tenant, those that end sooner are served first.
        only_prompt: whether the prompt alone is of use, with its log probabilities perhaps: the
            last token that is generated may then stand behind the context.
        tells_progress: whether each step that computes a part of the prompt is told, by a delta
            without tokens (`CompletionDelta.progress`).
        ends_at_context: whether `max_tokens` may be more than there is room for: the answer ends
            where the context, or the KV cache, does.
        tells_drawn: whether log probabilities are of what tokens are drawn from, whatever the
            engine's `logprobs_mode` says; those of a prompt are raw.

    Raises:
        RequestError: a value is out of its range; names it.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    adapter: str | None = None
    adapter_scales: Mapping[str, float] | tuple[tuple[str, float], ...] | None = None
    timeout_s: float | None = None
    only_prompt: bool = False
    tells_progress: bool = False
    ends_at_context: bool = False
    tells_drawn: bool = False

    def __post_init__(self) -> None:
        check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, 0.0, MAX_TIMEOUT_S, open_low=True)
        if not isinstance(self.tenant, str):
            raise RequestError(f"tenant is {self.tenant!r}; it must be a text", "tenant")
        self._take_scales()
        if self.cache_salt == "":
            raise RequestError(
                "cache_salt is empty; give it a secret text, or leave it out", "cache_salt"
            )

    def _take_scales(self) -> None:
        """Check the scales of adapters, and bring them into their form."""
        if self.adapter_scales is None:
            return
        name = "adapter_scales"
        if self.adapter is not None:
            raise RequestError(
                f"adapter is {self.adapter!r}, and {name} are given, too; give one of them", name
            )
        scales = dict(self.adapter_scales)
        for each, scale in scales.items():
            if not isinstance(each, str):
                raise RequestError(f"{name} has {each!r}; name adapters by their texts", name)
            check_number(name, scale, -MAX_SCALE, MAX_SCALE)
        object.__setattr__(self, name, tuple(sorted(scales.items())))
