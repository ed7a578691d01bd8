"""Time decoding steps with LoRA adapters beside steps of the same artifact without.

    python -m benchmarks.adapters --artifact DIR [--provider cpu] [--rows 8] [--adapter-dtype int4]

Two models take turns: one loaded without slots for adapters, one with as many as there are rows.
A turn is several steps of one case, as a server runs them, of which the first do not count: what
ran before may have left other weights in the caches. Adapters are random. Times are medians over
all turns; the ratio is to the model without slots.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import (
    PROJECTIONS,
    LoraAdapter,
    LoraDelta,
    Projection,
    projection_shapes,
)
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import LoadOptions, Model, StepInputs
from onnxport.providers.registry import open_model

# What PEFT makes by default, and the most that is usual.
SHAPES: Final[dict[str, tuple[int, tuple[Projection, ...]]]] = {
    "rank 8 of q_proj and v_proj": (8, ("q_proj", "v_proj")),
    "rank 8 of all seven": (8, PROJECTIONS),
    "rank 16 of all seven": (16, PROJECTIONS),
}

# Steps of a turn.
UNCOUNTED: Final = 3
COUNTED: Final = 6


def random_adapter(
    spec: ArchSpec, seed: int, rank: int, projections: tuple[Projection, ...]
) -> LoraAdapter:
    """An adapter of every layer, with additions that are small beside the projections."""
    rng = np.random.default_rng(seed)
    deltas = {}
    for projection in projections:
        for layer in range(spec.num_layers):
            shapes = projection_shapes(spec, layer)
            if projection not in shapes:
                continue
            outputs, inputs = shapes[projection]
            a = rng.standard_normal((rank, inputs), np.float32) / np.float32(inputs**0.5)
            b = rng.standard_normal((outputs, rank), np.float32) * np.float32(1e-3)
            deltas[layer, projection] = LoraDelta(a, b)
    return LoraAdapter(deltas)


def step(rows: int, past: int, new: int, block_size: int) -> StepInputs:
    """Rows with `new` tokens each behind `past` ones."""
    blocks = -(-(past + new) // block_size)
    return StepInputs(
        input_ids=np.arange(3, 3 + rows * new, dtype=np.int64),
        block_table=np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks),
        cumulative_sequence_lengths=np.arange(rows + 1, dtype=np.int32) * np.int32(new),
        past_sequence_lengths=np.full(rows, past, np.int32),
        attention_metadata=np.array([new, past + new, past + new], np.int32),
        logits_indices=(np.arange(1, rows + 1, dtype=np.int32) * new - 1).astype(np.int32),
    )


def with_slots(inputs: StepInputs, slots: NDArray[np.int32] | None) -> StepInputs:
    """The same step with adapters."""
    return StepInputs(
        input_ids=inputs.input_ids,
        block_table=inputs.block_table,
        cumulative_sequence_lengths=inputs.cumulative_sequence_lengths,
        past_sequence_lengths=inputs.past_sequence_lengths,
        attention_metadata=inputs.attention_metadata,
        logits_indices=inputs.logits_indices,
        adapter_slots=slots,
    )


def seconds(model: Model, inputs: StepInputs) -> float:
    """What one run takes."""
    begin = time.perf_counter()
    model.run(inputs)
    return time.perf_counter() - begin


def measure(plain: Model, adapted: Model, inputs: StepInputs, rounds: int) -> None:
    """Time every case in turn and print a line for each."""
    rows = len(inputs.past_sequence_lengths)
    cases: dict[str, tuple[Model, StepInputs]] = {
        "loaded without slots": (plain, inputs),
        "no adapter in the batch": (adapted, inputs),
        "one adapter for all rows": (adapted, with_slots(inputs, np.full(rows, 1, np.int32))),
        f"{rows} adapters": (adapted, with_slots(inputs, np.arange(1, rows + 1, dtype=np.int32))),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (model, case) in cases.items():
            turn = [seconds(model, case) for _ in range(UNCOUNTED + COUNTED)]
            times[name] += turn[UNCOUNTED:]
    base = median(times["loaded without slots"])
    for name, found in times.items():
        print(f"  {name:26} {median(found) * 1e3:8.2f} ms  {median(found) / base:5.2f}", flush=True)


def main() -> None:
    """Load both models and print a table for each shape of adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--provider", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=1, help="of each row; more: prefill")
    parser.add_argument("--past", type=int, default=128, help="tokens in the cache, a row")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each case")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--adapter-dtype", default="auto", help="what adapters are kept in")
    arguments = parser.parse_args()
    spec = Artifact.read(arguments.artifact).manifest.model
    room = arguments.rows * (arguments.past + arguments.new_tokens + 256)

    def load(max_adapters: int) -> Model:
        rank = max(rank for rank, _ in SHAPES.values())
        options = LoadOptions(
            threads=arguments.threads,
            kv_cache_tokens=room,
            max_adapters=max_adapters,
            max_adapter_rank=rank,
            adapter_dtype=arguments.adapter_dtype,
            hybrid_kv_cache=False,  # `step` has one block table
        )
        return open_model(arguments.artifact, arguments.provider, options)

    plain, adapted = load(0), load(arguments.rows)
    inputs = step(
        arguments.rows, arguments.past, arguments.new_tokens, plain.capabilities.block_size
    )
    device = platform.processor() or platform.machine()
    print(
        f"{device}: {arguments.provider}, {arguments.rows} rows, {len(inputs.input_ids)} tokens, "
        f"adapters in {arguments.adapter_dtype}"
    )
    for name, (rank, projections) in SHAPES.items():
        for slot in range(1, arguments.rows + 1):
            adapted.set_adapter(slot, random_adapter(spec, slot, rank, projections))
        print(name)
        measure(plain, adapted, inputs, arguments.rounds)


if __name__ == "__main__":
    main()
