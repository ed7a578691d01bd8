"""Time the attention of a decode step, and of a prefill, by the type of the KV cache, alternating.

    python -m benchmarks.kv_cache
    python -m benchmarks.kv_cache --contexts 2048,8192 --heads 32,8,128 --threads 1

Milliseconds a layer, bytes of the cache that a token takes in it, and the ratio to float32 of both.
The figures are for the shape of Qwen2.5-0.5B (14 heads, 2 key/value heads of 64) unless --heads
says otherwise. Several layers, each with its own cache, keep the processor's caches from holding
what a whole model would have evicted. Times are minima over rounds that take the types in turn.
"""

from __future__ import annotations

import argparse
import platform
from dataclasses import replace

from benchmarks.paged_attention import TYPES, Runner, Setting, Shape, measure
from onnxport.providers.cpu.library import find_library, isa


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="512,2048,8192", help="tokens in the cache")
    parser.add_argument("--heads", default="14,2,64", help="query heads, kv heads, head size")
    parser.add_argument("--caches", default="float32,float16,int8,int4", help=", ".join(TYPES))
    parser.add_argument("--rows", type=int, default=1, help="sequences of the decode step")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring, for each shape")
    arguments = parser.parse_args()
    library = find_library()
    if library is None:
        parser.error("the operator library was not built")
    heads, kv_heads, head_size = (int(x) for x in arguments.heads.split(","))
    caches = arguments.caches.split(",")
    base = Setting(
        heads, kv_heads, head_size, caches[0], "tiled", 16, arguments.layers, arguments.threads
    )
    settings = [replace(base, cache=cache) for cache in caches]
    shapes = {
        f"decode {arguments.rows} x {context}": Shape(arguments.rows, context - 1, 1)
        for context in map(int, arguments.contexts.split(","))
    }
    shapes[f"prefill {arguments.prefill}"] = Shape(1, 0, arguments.prefill)
    print(f"{platform.processor() or platform.machine()}, kernels {isa()}, {base}")
    for name, shape in shapes.items():
        runners = [Runner(library, setting, shape) for setting in settings]
        times = [t / arguments.layers for t in measure(runners, arguments.seconds)]
        print(name)
        for setting, time in zip(settings, times, strict=True):
            token_bytes = 2 * kv_heads * setting.row_bytes
            first_bytes = 2 * kv_heads * settings[0].row_bytes
            print(
                f"  {setting.cache:10}{time * 1e3:10.4f} ms{times[0] / time:7.2f} x"
                f"{token_bytes:8} bytes a token{first_bytes / token_bytes:7.2f} x",
                flush=True,
            )


if __name__ == "__main__":
    main()
