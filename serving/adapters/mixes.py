"""Mixes of adapters: sums of loaded ones, each times a scale, as llama.cpp's server has them.

The sum of low-rank products is one of all ranks: A one below the other, B side by side, times the
scales. So a mix takes a slot as any adapter does. It is kept by its parts, which hold the weights,
and is made of them anew whenever it gets a slot.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from onnxport.errors import AdapterError, RequestError
from onnxport.graphs.lora import LoraAdapter, LoraDelta, Projection
from onnxport.serving.adapters.adapter import Adapter, Ranks
from onnxport.serving.adapters.model_slots import Entry

Parts = tuple[tuple[Adapter, float], ...]


def mix_of(pairs: Iterable[tuple[Adapter, float]], max_rank: int) -> Adapter | None:
    """Return the sum of loaded adapters, each times a scale.

    Args:
        pairs: the adapters, each once, and their scales. One with the scale 0 is as good as none.
        max_rank: of a slot.

    Returns:
        A mix, which has no number yet; the adapter itself of a single one with the scale 1; None if
        none is left.

    Raises:
        RequestError: it has a larger rank than a slot, or its parts begin at other tokens.
    """
    parts = tuple(
        sorted(((one, scale) for one, scale in pairs if scale), key=lambda pair: pair[0].number)
    )
    if not parts:
        return None
    if len(parts) == 1 and parts[0][1] == 1.0:
        return parts[0][0]
    name = " + ".join(f"{scale:g} * {one.name}" for one, scale in parts)
    invocation = _invocation_of(name, [one for one, _ in parts])
    ranks = joint_ranks(one.ranks for one, _ in parts)
    rank = max(ranks.values(), default=0)
    if rank > max_rank:
        raise RequestError(
            f"the sum {name} of LoRA adapters has rank {rank}, and the model was loaded for ranks "
            f"up to {max_rank}; ask for fewer of them, or raise max_adapter_rank (--max-lora-rank)",
            "lora",
        )
    # In the order in which they are added, on which the sum's last bits depend, and so K/V.
    content = [(one.fingerprint, scale) for one, scale in parts]
    digest = hashlib.sha256(json.dumps(["mix", content]).encode()).hexdigest()
    return Adapter(
        *(name, 0, digest, rank, Path(), None), parts=parts, invocation=invocation, ranks=ranks
    )


def _invocation_of(name: str, members: Sequence[Adapter]) -> tuple[int, ...]:
    """Return what all parts of a sum begin with, for a slot acts on a token as a whole."""
    if len({one.invocation for one in members}) > 1:
        told = ", ".join(
            f"{one.name} at the tokens {list(one.invocation)}"
            if one.invocation
            else f"{one.name} at the first token"
            for one in members
        )
        raise RequestError(
            f"the LoRA adapters of the sum {name} begin at different tokens: {told}; an aLoRA goes "
            "alone, or with others of the same invocation tokens",
            "lora",
        )
    return members[0].invocation


def joint_ranks(several: Iterable[Ranks]) -> Ranks:
    """Return the ranks of a sum of adapters."""
    joint: dict[tuple[int, Projection], int] = {}
    for ranks in several:
        for key, rank in ranks.items():
            joint[key] = joint.get(key, 0) + rank
    return joint


def mixed(name: str, parts: Sequence[tuple[LoraAdapter, float]]) -> LoraAdapter:
    """Return the sum of adapters of one model, each times a scale.

    Raises:
        AdapterError: a number becomes too large; names the sum by `name`.
    """
    deltas: dict[tuple[int, Projection], list[LoraDelta]] = {}
    for adapter, scale in parts:
        for key, delta in adapter.deltas.items():
            with np.errstate(over="ignore"):
                scaled = delta.b * np.float32(scale)
            if not math.isfinite(float(np.abs(scaled).max(initial=0.0))):
                raise AdapterError(
                    f"the sum {name} of LoRA adapters has numbers that are too large for float32; "
                    "take smaller scales"
                )
            deltas.setdefault(key, []).append(LoraDelta(delta.a, scaled))
    return LoraAdapter(
        {
            key: LoraDelta(
                np.concatenate([one.a for one in several]),
                np.concatenate([one.b for one in several], axis=1),
            )
            for key, several in deltas.items()
        }
    )


class Mixes:
    """The mixes that requests use, or that still have a slot. The engine's thread's."""

    def __init__(self) -> None:
        self._by_parts: dict[Parts, Entry] = {}  # those that requests find
        # By number: these, and those whose parts were unloaded or replaced.
        self._entries: dict[int, Entry] = {}
        # By number: those that no request uses, which are no more than slots: others are spent.
        self._idle: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them."""
        return tuple(self._entries.values())

    def find(self, mix: Adapter) -> Entry | None:
        """Return the one of these parts; None: there is none yet."""
        return self._by_parts.get(mix.parts)

    def add(self, mix: Adapter, number: int, loaded: Mapping[int, Entry]) -> Entry:
        """Keep a mix of adapters that are loaded, by their numbers, and return it."""
        parts = tuple((loaded[one.number], scale) for one, scale in mix.parts)
        entry = Entry(replace(mix, number=number), MixedWeights(mix.name, parts))
        for part, _ in parts:
            assert not part.hidden
            part.num_mixes += 1
        self._by_parts[mix.parts] = entry
        self._entries[number] = entry
        return entry

    def note_use(self, mix: Entry) -> None:
        """A request that uses one has come or ended."""
        if mix.num_requests:
            self._idle.pop(mix.adapter.number, None)
        else:
            self._idle[mix.adapter.number] = mix

    def hide(self, part: Adapter) -> None:
        """Let no more requests find mixes of an adapter."""
        for parts, entry in list(self._by_parts.items()):
            if part in entry.adapter.members:
                del self._by_parts[parts]
                entry.hidden = True

    def spent(self) -> list[Entry]:
        """Those that no request uses, and that have no slot or are found no more."""
        return [one for one in self._idle.values() if is_spent(one)]

    def idle(self) -> list[Entry]:
        """Those that no request uses."""
        return list(self._idle.values())

    def remove(self, entry: Entry) -> list[Entry]:
        """Forget one; returns its parts, which it needs no more."""
        self._by_parts.pop(entry.adapter.parts, None)
        del self._entries[entry.adapter.number]
        self._idle.pop(entry.adapter.number, None)
        parts = parts_of(entry)
        for part in parts:
            part.num_mixes -= 1
        return parts

    def check(self) -> None:
        """Assert the invariants (for tests)."""
        assert not any(is_spent(one) for one in self.entries)
        idle = {number: one for number, one in self._entries.items() if not one.num_requests}
        assert idle == self._idle
        assert all(not one.hidden for one in self._by_parts.values())
        for entry in self.entries:
            assert entry.hidden != (self._by_parts.get(entry.adapter.parts) is entry)
            for part in parts_of(entry):
                uses = [one for one in self.entries if part.adapter in one.adapter.members]
                assert part.num_mixes == len(uses)
                assert part.num_mixed_requests == sum(one.num_requests for one in uses)


class MixedWeights:
    """The weights of a mix, made of those of its parts each time."""

    def __init__(self, name: str, parts: Sequence[tuple[Entry, float]]) -> None:
        self._name = name
        self.parts = parts

    def read(self) -> LoraAdapter:
        """Make them. Raises AdapterError where a number becomes too large."""
        return mixed(self._name, [(part.weights, scale) for part, scale in self.parts])


def parts_of(entry: Entry) -> list[Entry]:
    """Return the loaded adapters that a mix is made of; of any other, none."""
    return (
        [part for part, _ in entry.source.parts] if isinstance(entry.source, MixedWeights) else []
    )


def is_spent(mix: Entry) -> bool:
    """Whether no request uses a mix, and it has no slot or is found no more."""
    return not mix.num_requests and (mix.slot is None or mix.hidden)
