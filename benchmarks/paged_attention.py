"""Time the CPU PagedAttention operator by shape: milliseconds, GFLOP/s and GB/s of cache read.

    python -m benchmarks.paged_attention --shapes decode-1x2048,prefill-512
    python -m benchmarks.paged_attention --peer other_build.so   # alternates the two, adds a ratio

The figures are for one layer of Qwen2.5-0.5B (14 heads, 2 key/value heads of 64) unless --heads
says otherwise. A graph of several layers, each with its own cache, keeps the processor's caches
from holding what a whole model would have evicted. Times are minima over the rounds.
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.cache_rows import SCALE_BYTES, int4_groups, row_elements
from onnxport.graphs.passes.kv_dtype import GRANULARITIES
from onnxport.providers.cpu.library import find_library, isa
from onnxport.providers.memory import huge_page_zeros

TYPES = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, bfloat16),
    "int8": (TensorProto.INT8, np.int8),
    "int4": (TensorProto.UINT8, np.uint8),
}


@dataclass(frozen=True)
class Shape:
    """A step: so many sequences, each with past tokens in the cache and new ones to attend."""

    batch: int
    past: int
    new: int

    def flops(self, heads: int, head_size: int) -> int:
        """Multiplications and additions of one layer, masked keys not counted."""
        keys = self.new * self.past + self.new * (self.new + 1) // 2
        return 4 * self.batch * keys * heads * head_size

    def cache_bytes(self, kv_heads: int, row_bytes: int) -> int:
        """Bytes of keys and values in use, each counted once; a row is a token of one head."""
        return 2 * self.batch * (self.past + self.new) * kv_heads * row_bytes


SHAPES = {
    "decode-1x128": Shape(1, 127, 1),
    "decode-1x512": Shape(1, 511, 1),
    "decode-1x2048": Shape(1, 2047, 1),
    "decode-1x8192": Shape(1, 8191, 1),
    "decode-8x512": Shape(8, 511, 1),
    "decode-32x512": Shape(32, 511, 1),
    "prefill-128": Shape(1, 0, 128),
    "prefill-512": Shape(1, 0, 512),
    "prefill-2048": Shape(1, 0, 2048),
    "chunk-256-after-2048": Shape(1, 2048, 256),
}
TILE = 16  # tokens
INPUTS = ["qkv", "", "", "", "", "cumulative", "past", "table", "cosine", "sine"]


@dataclass(frozen=True)
class Setting:
    """What the operator's node says."""

    heads: int
    kv_heads: int
    head_size: int
    cache: str
    layout: str
    block_size: int
    layers: int
    threads: int

    @property
    def row_elements(self) -> int:
        """Elements of a token and KV head in a cache, what belongs to integers included."""
        return row_elements(self.cache, self.head_size)

    @property
    def row_bytes(self) -> int:
        """Bytes of the same."""
        return self.row_elements * np.dtype(TYPES[self.cache][1]).itemsize


def build_model(setting: Setting) -> bytes:
    """A graph of independent layers over the same query."""
    kind = TYPES[setting.cache][0]
    int32, real = TensorProto.INT32, TensorProto.FLOAT
    values = [
        helper.make_tensor_value_info("qkv", real, ["tokens", "width"]),
        helper.make_tensor_value_info("cumulative", int32, ["batch1"]),
        helper.make_tensor_value_info("past", int32, ["batch"]),
        helper.make_tensor_value_info("table", int32, ["batch", "blocks"]),
        helper.make_tensor_value_info("cosine", real, ["positions", "half"]),
        helper.make_tensor_value_info("sine", real, ["positions", "half"]),
    ]
    attributes: dict[str, object] = {
        "num_heads": setting.heads,
        "kv_num_heads": setting.kv_heads,
        "do_rotary": 1,
        "cache_layout": setting.layout,
    }
    if granularity := GRANULARITIES.get(setting.cache):
        attributes |= {"k_quant_type": granularity, "v_quant_type": granularity}
    nodes, results = [], []
    for i in range(setting.layers):
        inputs = [*INPUTS]
        inputs[3:5] = [f"k{i}", f"v{i}"]
        outputs = [f"y{i}", f"ko{i}", f"vo{i}"]
        nodes.append(
            helper.make_node(
                "PagedAttention", inputs, outputs, domain="com.microsoft", **attributes
            )
        )
        shape = ["blocks_", "size", "kv_heads", "head"]
        values += [helper.make_tensor_value_info(n, kind, shape) for n in inputs[3:5]]
        results.append(helper.make_tensor_value_info(outputs[0], real, ["tokens", "hidden"]))
        results += [helper.make_tensor_value_info(n, kind, shape) for n in outputs[1:]]
    graph = helper.make_graph(nodes, "layers", values, results)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def some_cache(setting: Setting, num_blocks: int, rng: np.random.Generator) -> NDArray[Any]:
    """A cache of random numbers on huge pages, as the provider has it.

    Integers are random bytes, behind which each tile has its scales.
    """
    shape = (num_blocks, setting.block_size, setting.kv_heads, setting.row_elements)
    cache = huge_page_zeros(shape, TYPES[setting.cache][1])
    if setting.cache not in GRANULARITIES:
        cache[...] = rng.standard_normal(shape, np.float32) * 0.5
        return cache
    cache[...] = rng.integers(-127, 128, shape, np.int8).view(cache.dtype)
    tiles = cache.reshape(-1, TILE * setting.row_elements)
    if setting.cache == "int4":
        groups = int4_groups(setting.head_size)
        sides = tiles[:, TILE * setting.head_size // 2 : -TILE * SCALE_BYTES]
        sides.reshape(-1, groups, 2, TILE)[:, :, 0] = 8  # steps
    tiles[:, -TILE * SCALE_BYTES :] = np.full(TILE, 0.005, np.float32).view(cache.dtype)
    return cache


class Runner:
    """One library's session with one shape bound to it."""

    def __init__(self, library: Path, setting: Setting, shape: Shape) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = setting.threads
        # Else threads of the one that has just run take processors from the other one.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.register_custom_ops_library(str(library))
        self.session = ort.InferenceSession(
            build_model(setting), options, providers=["CPUExecutionProvider"]
        )
        self.binding = self.session.io_binding()
        rng = np.random.default_rng(0)
        tokens, total = shape.batch * shape.new, shape.past + shape.new
        width = (setting.heads + 2 * setting.kv_heads) * setting.head_size
        per_sequence = -(-total // setting.block_size)
        blocks = rng.permutation(per_sequence * shape.batch)
        feeds = {
            "qkv": rng.standard_normal((tokens, width), np.float32),
            "cumulative": (np.arange(shape.batch + 1) * shape.new).astype(np.int32),
            "past": np.full(shape.batch, shape.past, np.int32),
            "table": blocks.reshape(shape.batch, per_sequence).astype(np.int32),
            "cosine": np.ones((total, setting.head_size // 2), np.float32),
            "sine": np.zeros((total, setting.head_size // 2), np.float32),
        }
        for name, array in feeds.items():
            self.binding.bind_cpu_input(name, array)
        kind = TYPES[setting.cache][0]
        self.arrays = []
        for i in range(setting.layers):
            self.binding.bind_output(f"y{i}")
            for name in "kv":
                array = some_cache(setting, len(blocks), rng)
                raw = array.view(np.uint16) if setting.cache == "bfloat16" else array
                value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, kind)
                self.arrays.append((array, value))
                self.binding.bind_ortvalue_input(f"{name}{i}", value)
                self.binding.bind_ortvalue_output(f"{name}o{i}", value)

    def seconds(self) -> float:
        """Run all layers once and return how long it took."""
        start = time.perf_counter()
        self.session.run_with_iobinding(self.binding)
        return time.perf_counter() - start


def measure(runners: list[Runner], seconds: float) -> list[float]:
    """The minimum of each, alternating."""
    best = [runner.seconds() for runner in runners]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, runner in enumerate(runners):
            best[i] = min(best[i], runner.seconds())
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--heads", default="14,2,64", help="query heads, kv heads, head size")
    parser.add_argument("--cache", choices=TYPES, default="float32")
    parser.add_argument("--layout", choices=("tiled", "paired", "canonical"), default="tiled")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring, for each shape")
    parser.add_argument("--library", type=Path, default=find_library())
    parser.add_argument("--peer", type=Path, help="another library to alternate with")
    arguments = parser.parse_args()
    if arguments.library is None:
        parser.error("the operator library was not built; pass --library")
    heads, kv_heads, head_size = (int(x) for x in arguments.heads.split(","))
    setting = Setting(
        heads,
        kv_heads,
        head_size,
        arguments.cache,
        arguments.layout,
        arguments.block_size,
        arguments.layers,
        arguments.threads,
    )
    print(f"{platform.processor() or platform.machine()}, kernels {isa()}, {setting}")
    libraries = [arguments.library] + ([arguments.peer] if arguments.peer else [])
    for name in arguments.shapes.split(","):
        shape = SHAPES[name]
        runners = [Runner(library, setting, shape) for library in libraries]
        times = [t / setting.layers for t in measure(runners, arguments.seconds)]
        line = f"{name:22}"
        for t in times:
            gflops = shape.flops(heads, head_size) / t / 1e9
            gbytes = shape.cache_bytes(kv_heads, setting.row_bytes) / t / 1e9
            line += f" {t * 1e3:9.4f} ms {gflops:7.1f} GFLOP/s {gbytes:6.1f} GB/s |"
        if arguments.peer:
            line += f" peer/this {times[1] / times[0]:.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
