"""Providers that may take over, and what is told of those that were lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from onnxport.providers.base import Capabilities, Model
from onnxport.serving.linear_attention import most_kept


@dataclass(frozen=True, slots=True)
class Fallback:
    """A provider that the user allows to take over.

    Attributes:
        provider: its name, as the user gave it.
        load: loads the same artifact with it, or raises; called at most once.
    """

    provider: str
    load: Callable[[], Model]


@dataclass(frozen=True, slots=True)
class Loss:
    """A provider that could not be used, at load or any more."""

    provider: str
    device: str | None  # None: it could not even be loaded
    reason: str
    replaced_by: str | None  # the provider that took over; None: there was none left
    since: str = field(  # UTC, as in 2026-01-31T12:00:00+00:00
        default_factory=lambda: datetime.fromtimestamp(int(time.time()), UTC).isoformat()
    )


@dataclass(frozen=True, slots=True)
class Standby:
    """Who takes over, in order, and who could not be loaded in the first place."""

    fallbacks: tuple[Fallback, ...] = ()
    losses: tuple[Loss, ...] = ()


def describe(loaded: Capabilities) -> str:
    """Say what was loaded and where it really runs, for a log."""
    placement = ", ".join(f"{name} {count}" for name, count in loaded.placement.items())
    on_host = ", ".join(f"{name} {count}" for name, count in loaded.on_host.items())
    states = ""
    if loaded.state_slots:
        size = loaded.state_bytes / 2**20
        states = f", room for {loaded.state_slots} states of sequences, {size:.1f} MiB each"
        if (kept := most_kept(loaded)) is not None:
            states += f", at most {kept} of them kept for prefixes"
    groups = f" for {len(loaded.windows)} groups of layers" if len(loaded.windows) > 1 else ""
    return (
        f"{loaded.provider} on {loaded.device}{' (emulated)' if loaded.emulated else ''}: "
        f"{loaded.attention} attention, computing in {loaded.compute_dtype}, "
        f"{loaded.num_blocks} KV blocks of {loaded.block_size} tokens{groups} in "
        f"{loaded.kv_cache_dtype}{states}; "
        f"nodes: {placement or 'unknown'}; run by the host instead: {on_host or 'none'}"
    )
