"""What a provider can do on a machine, before any artifact is loaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

Attention = Literal["native", "custom", "decomposed"]


@dataclass(frozen=True, slots=True)
class Features:
    """What a provider can do on this machine, before any artifact is loaded."""

    attention: tuple[Attention, ...]  # the best first
    dtypes: tuple[str, ...]  # of activations, the preferred first: float32, float16, bfloat16
    kv_cache_dtypes: tuple[str, ...]  # what LoadOptions.kv_cache_dtype may be, besides auto
    # Type of activations -> the caches that go with it; one that is not there goes with all.
    caches_beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # matmul_accuracy_level -> the type that all activations have then; others leave it open.
    level_dtypes: Mapping[int, str] = field(default_factory=dict)
    has_experts: bool = False  # experts of a layer compute the tokens that they are given alone
    has_other_experts: bool = False  # likewise those with a GELU, or without a gate
    has_states: bool = False  # layers run that keep states of sequences
    has_latents: bool = False  # multi-head latent attention is computed
    # Layers may have other heads than others, and read their keys and values.
    has_mixed_layers: bool = False
    tells_states: bool = False  # hidden states are told, of which embeddings are made
    # Attention -> the activations that it takes; one that is not there takes all.
    attention_dtypes: Mapping[Attention, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def one_type(
        cls,
        attention: tuple[Attention, ...],
        dtypes: tuple[str, ...],
        native_dtypes: Collection[str] | None = None,
        *,
        runs_ours: bool = True,
    ) -> Features:
        """Of a device whose cache has the type of its activations.

        Args:
            attention: that it has, the best first.
            dtypes: of activations, the preferred first.
            native_dtypes: those of them that its native attention takes; None: all.
            runs_ours: whether it runs graphs of standard operators that our passes make, and so
                latent attention, layers with a state and those that differ, and tells hidden
                states.
        """
        taken = dtypes if native_dtypes is None else tuple(d for d in dtypes if d in native_dtypes)
        by_attention: dict[Attention, tuple[str, ...]] = {"native": taken}
        return cls(
            attention,
            dtypes,
            dtypes,
            {dtype: (dtype,) for dtype in dtypes},
            has_states=runs_ours,
            has_latents=runs_ours,
            has_mixed_layers=runs_ours,
            tells_states=runs_ours,
            attention_dtypes={} if taken == dtypes else by_attention,
        )

    def go_together(
        self,
        dtype: str,
        kv_cache_dtype: str,
        level: int | None,
        attention: Attention | None = None,
    ) -> bool:
        """Whether types, matmul_accuracy_level and attention, as LoadOptions has them, agree."""
        asked = {None if dtype == "auto" else dtype, self.level_dtypes.get(level or 0)} - {None}
        taken = self.dtypes
        if attention is not None:
            taken = self.attention_dtypes.get(attention, taken)
        return any(
            asked <= {own} and kv_cache_dtype in ("auto", *self._caches(own)) for own in taken
        )

    def _caches(self, dtype: str) -> tuple[str, ...]:
        return self.caches_beside.get(dtype, self.kv_cache_dtypes)
