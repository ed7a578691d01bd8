"""What a user may choose about the engine, apart from the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, get_args

from onnxport.errors import CapacityError
from onnxport.graphs.embedding_spec import POOLINGS, Dimensions, Pooling
from onnxport.serving.param_ranges import MAX_LOGPROBS
from onnxport.serving.speculation.config import SpeculationConfig

MOST_TOKENS = 2**20  # of a step; more would not fit any memory

SchedulingPolicy = Literal["fcfs", "priority", "fair"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
Preemption = Literal["auto", "recompute", "swap"]
STAGING_BYTES = 256 << 20  # host memory that a disk tier gets when none was given


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's limits, with vLLM's names where it has them.

    Attributes:
        max_num_seqs: most sequences that run at once, that is rows of one step.
        max_num_batched_tokens: most tokens of one step, over all its rows. At least
            `max_num_seqs`: every running request decodes in every step, and prompts beside
            them then get `max_num_batched_tokens - max_num_seqs + 1` tokens or more.
        seed: makes the requests that bring no seed reproducible by order of arrival; None draws
            from the operating system.
        max_queued_requests: most requests that wait for their first row; one more is refused with
            `OverloadedError`. Under "fair" each tenant may fill an equal part of them, counting
            one tenant more than there are, so that there is always room for who comes next.
        scheduling_policy: "fcfs" serves by arrival; "priority" lower priority numbers first;
            "fair" shares tokens between the tenants of one priority by deficit round robin.
        enable_prefix_caching: reuse the K/V of tokens that another request has computed.
        preemption: what becomes of the K/V of a request that has to yield: "recompute" drops
            what is overwritten, "swap" saves it in host memory, "auto" does what is measured to
            be faster.
        kv_host_memory: bytes of host memory for K/V blocks that leave the pool.
        kv_disk: folder for K/V blocks that leave host memory, kept between runs; None: no disk.
        kv_disk_bytes: most bytes that the folder may hold.
        speculation: how tokens are guessed ahead; None: not at all.
        max_host_adapters: most LoRA adapters that are loaded, at least as many as the model has
            slots for; those that wait for a slot are in host memory. None: as many as slots.
        max_logprobs: most of the likeliest tokens whose log probabilities a request may ask for at
            each position, of its output or its prompt; None, or vLLM's -1: no limit, and a request
            that asks for -1 gets all tokens. One request gets at most
            `logprob_limits.MOST_LOGPROBS` in all.
        logprobs_mode: what log probabilities are of: "raw_logprobs" of the model's own logits,
            "processed_logprobs" of what a token is drawn from, with what changes logits, the
            temperature, and -inf for what must not come or is cut by `min_p`, `top_k`, `top_p` or
            llama.cpp's samplers; "raw_logits" and "processed_logits" are the logits themselves.
            Prompts are not sampled, so theirs are raw.
        embeddings: whether prompts can be embedded; None: where the checkpoint says that it is for
            that.
        pooling: what a vector is made of, "last" or "mean"; None: what the checkpoint says, or what
            the model makes of the last token.
        matryoshka_dimensions: what vectors may be cut to, "any" for all numbers; None: what the
            checkpoint says.
        score_template: a file, in Jinja, of how pairs of texts are written that are judged; None:
            as the artifact has it.

    Raises:
        CapacityError: a limit is out of its range, or two contradict each other.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    seed: int | None = None
    max_queued_requests: int = 1024
    scheduling_policy: SchedulingPolicy = "fcfs"
    enable_prefix_caching: bool = True
    preemption: Preemption = "auto"
    kv_host_memory: int = 0
    kv_disk: Path | None = None
    kv_disk_bytes: int = 16 << 30
    speculation: SpeculationConfig | None = None
    max_host_adapters: int | None = None
    max_logprobs: int | None = MAX_LOGPROBS
    logprobs_mode: LogprobsMode = "raw_logprobs"
    embeddings: bool | None = None
    pooling: Pooling | None = None
    matryoshka_dimensions: Dimensions | None = None
    score_template: Path | None = None

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("max_num_seqs", "max_queued_requests", "kv_disk_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise CapacityError(f"{name} is {value}; it must be at least 1")
        if self.max_host_adapters is not None and self.max_host_adapters < 1:
            raise CapacityError(
                f"max_host_adapters is {self.max_host_adapters}; it must be at least 1"
            )
        if self.kv_disk is not None:
            object.__setattr__(self, "kv_disk", Path(self.kv_disk))  # it may come as a text
        if self.max_logprobs == -1:
            object.__setattr__(self, "max_logprobs", None)
        if self.max_logprobs is not None and self.max_logprobs < 0:
            raise CapacityError(
                f"max_logprobs is {self.max_logprobs}; give 0 or more, or -1 for no limit"
            )
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) > MOST_TOKENS:
                raise CapacityError(
                    f"{name} is {getattr(self, name)}; a step has at most {MOST_TOKENS} tokens"
                )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise CapacityError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs "
                f"{self.max_num_seqs}: a step must have room for one token of every running "
                "request; raise the first or lower the second"
            )
        for name, kind in (
            ("scheduling_policy", SchedulingPolicy),
            ("preemption", Preemption),
            ("logprobs_mode", LogprobsMode),
        ):
            value = getattr(self, name)
            if value not in get_args(kind):
                allowed = ", ".join(get_args(kind))
                raise CapacityError(f"{name} is {value!r}; it must be one of {allowed}")
        self._check_tiers()
        self._check_embeddings()

    @property
    def host_memory(self) -> int:
        """Bytes of host memory for blocks, with what a disk tier needs at least."""
        return self.kv_host_memory or (STAGING_BYTES if self.kv_disk else 0)

    def _check_tiers(self) -> None:
        if self.kv_host_memory < 0:
            raise CapacityError(
                f"kv_host_memory is {self.kv_host_memory}; it must be 0 or more bytes"
            )
        if self.preemption == "swap" and not self.kv_host_memory:
            raise CapacityError(
                "preemption is 'swap' and there is no host memory to swap to; set kv_host_memory, "
                "or let preemption be 'auto'"
            )
        tiers = self.preemption == "swap" or self.kv_host_memory or self.kv_disk
        if tiers and not self.enable_prefix_caching:
            raise CapacityError(
                "kv_host_memory, kv_disk and swapping find blocks by the hash of their tokens, "
                "which enable_prefix_caching turns on; turn it on, or leave them out"
            )

    def _check_embeddings(self) -> None:
        if not isinstance(self.embeddings, bool | None):
            raise CapacityError(f"embeddings is {self.embeddings!r}; give true or false")
        if self.pooling not in (None, *POOLINGS):
            allowed = ", ".join(POOLINGS)
            raise CapacityError(f"pooling is {self.pooling!r}; it must be one of {allowed}")
        template: object = self.score_template
        if isinstance(template, str):
            object.__setattr__(self, "score_template", Path(template))
        elif not isinstance(template, Path | None):
            raise CapacityError(f"score_template is {template!r}; give the path of a file")
        sizes = self.matryoshka_dimensions
        is_list = isinstance(sizes, tuple) and bool(sizes)
        if sizes not in (None, "any") and not (
            is_list and all(type(size) is int and size > 0 for size in sizes or ())
        ):
            raise CapacityError(
                f"matryoshka_dimensions is {sizes!r}; give a tuple of whole numbers above 0, or "
                "'any'"
            )
        for name in ("pooling", "matryoshka_dimensions", "score_template"):
            if self.embeddings is False and getattr(self, name) is not None:
                raise CapacityError(
                    f"{name} is {getattr(self, name)!r}, and embeddings is False: nothing is "
                    "embedded, nor judged; leave one of them out"
                )

    def _check_types(self) -> None:
        """Refuse what is of another type: Python itself would only stumble over it later."""
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "max_queued_requests"),
            *("kv_host_memory", "kv_disk_bytes", *([] if self.seed is None else ["seed"])),
            *([] if self.max_host_adapters is None else ["max_host_adapters"]),
            *([] if self.max_logprobs is None else ["max_logprobs"]),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise CapacityError(f"{name} is {value!r}; give a whole number")
        disk: object = self.kv_disk
        if disk == "" or not isinstance(disk, str | Path | None):
            raise CapacityError(f"kv_disk is {disk!r}; give the path of a folder")
        if not isinstance(self.enable_prefix_caching, bool):
            raise CapacityError(
                f"enable_prefix_caching is {self.enable_prefix_caching!r}; give true or false"
            )
        if not isinstance(self.speculation, SpeculationConfig | None):
            raise CapacityError(
                f"speculation is {self.speculation!r}; give a SpeculationConfig, of "
                "onnxport.serving.speculation.config"
            )


class EngineOptions(TypedDict, total=False):
    """Fields of `EngineConfig` as keyword arguments, but for the first three."""

    max_queued_requests: int
    scheduling_policy: SchedulingPolicy
    enable_prefix_caching: bool
    preemption: Preemption
    kv_host_memory: int
    kv_disk: Path | None
    kv_disk_bytes: int
    speculation: SpeculationConfig | None
    max_host_adapters: int | None
    max_logprobs: int | None
    logprobs_mode: LogprobsMode
    embeddings: bool | None
    pooling: Pooling | None
    matryoshka_dimensions: Dimensions | None
    score_template: Path | None
