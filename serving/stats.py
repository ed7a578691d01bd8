"""The engine's counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from onnxport.serving.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class SpeculationCounters:
    """What was guessed ahead."""

    num_drafts: int  # times that a sequence had some of its tokens guessed
    num_draft_tokens: int  # guesses that were checked
    num_accepted_tokens: int  # those that were right
    accepted_per_position: tuple[int, ...]  # likewise, by place in the draft


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's counters."""

    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int  # of the KV pool
    num_free_blocks: int
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    prompt_tokens: int  # of prompts that were computed, or found in the cache
    generation_tokens: int  # sampled so far
    prefix_cache_queries: int = 0  # tokens looked up in the prefix cache
    prefix_cache_hits: int = 0  # tokens found there
    num_cached_blocks: int = 0  # free blocks that hold reusable K/V
    host_tier_bytes: int = 0  # K/V in host memory
    disk_tier_bytes: int = 0  # K/V on disk
    num_blocks_saved: int = 0  # pool blocks saved in a tier
    num_blocks_loaded: int = 0  # pool blocks loaded from a tier
    num_refused: int = 0  # requests that found the queue full
    num_tier_errors: int = 0  # blocks of a tier that were corrupt, foreign or could not be stored
    num_losses: int = 0  # devices that were lost, or did not load though asked for first
    num_fallbacks: int = 0  # providers that took over
    speculation: SpeculationCounters | None = None  # None: nothing is guessed
    # Unfinished requests of each LoRA adapter that is loaded.
    adapter_requests: Mapping[str, int] = field(default_factory=dict)
    max_adapters: int = 0  # slots for LoRA adapters; 0: the model takes none
    running_adapters: tuple[str, ...] = ()  # of requests that run, by name
    waiting_adapters: tuple[str, ...] = ()  # of requests that wait; the same one may run too
    num_adapters: int = 0  # in host memory; those that were unloaded and are still used count
    num_adapter_swaps: int = 0  # slots that one adapter has lost to another
    finished: Mapping[FinishReason, int] = field(default_factory=dict)  # ended, by reason


def ended(stats: EngineStats, num_unfinished: int) -> EngineStats:
    """The counters of an engine that failed: nothing runs, and what did ended with an error."""
    finished = dict(stats.finished)
    finished["error"] = finished.get("error", 0) + num_unfinished
    return replace(
        stats,
        num_requests_running=0,
        num_requests_waiting=0,
        num_free_blocks=stats.num_blocks,
        adapter_requests=dict.fromkeys(stats.adapter_requests, 0),
        running_adapters=(),
        waiting_adapters=(),
        finished=finished,
    )
