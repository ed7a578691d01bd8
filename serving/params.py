"""How a request is decoded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onnxport.errors import RequestError

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128  # OpenAI's limit of n
MAX_PRIORITY = 2**31
MAX_TIMEOUT_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Decoding parameters of one request, with vLLM's names and defaults.

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
            sampled token alone, None reports nothing.
        n: how many completions of the prompt to generate; they share its K/V.

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

    def __post_init__(self) -> None:
        stop: object = self.stop  # a client may give one string, a list or None
        strings = (stop,) if isinstance(stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", strings)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "n", 1 if self.n is None else self.n)
        if self.top_k in (0, -1):  # vLLM's and OpenAI clients' ways to say "all"
            object.__setattr__(self, "top_k", None)
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_integer("top_k", self.top_k, 1, math.inf)
        _check_integer("max_tokens", self.max_tokens, 1, math.inf)
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_integer("seed", self.seed, -math.inf, math.inf)
        _check_integer("n", self.n, 1, MAX_COMPLETIONS)
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, math.inf)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}; every stop string must be text", "stop")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request is treated, apart from its tokens.

    Attributes:
        priority: lower numbers go first (as in vLLM); refused unless the policy knows priorities.
        tenant: whose request it is; the "fair" policy shares between tenants.
        cache_salt: requests share cached K/V with requests of the same salt alone.
        adapter: requests share cached K/V with requests of the same adapter alone.
        timeout_s: seconds from arrival after which the request ends with "timeout"; of requests
            of one priority and tenant, those that end sooner are served first.

    Raises:
        RequestError: a value is out of its range; names it.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    adapter: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        _check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.timeout_s is not None:
            _check("timeout_s", self.timeout_s, 0.0, MAX_TIMEOUT_S, open_low=True)
        if self.cache_salt == "":
            raise RequestError(
                "cache_salt is empty; give it a secret text, or leave it out", "cache_salt"
            )


def _check(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise RequestError unless low <= value <= high (low < value if `open_low`)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} is {value!r}; it must be in {bracket}{low}, {high}]", name)


def _check_integer(name: str, value: int | None, low: float, high: float) -> None:
    """Raise RequestError unless `value` is None or an integer, low <= value <= high."""
    if value is None:
        return
    if not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it must be an integer", name)
    _check(name, value, low, high)
