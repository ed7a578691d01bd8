"""Time products with quantized weights: our operator beside ONNX Runtime's MatMulNBits.

    python -m benchmarks.matmul --shapes qkv,gate_up --rows 1,16,512 --isa amx,avx512vnni

The shapes are Qwen2.5-0.5B's. Each session has several layers with weights of their own, so that
the processor's caches hold no more than they would in a whole model. The sessions take turns;
times are minima over the rounds. GB/s counts the weights once.

Our instruction sets that are not the best one meet ONNX Runtime's kernels of the same set under a
mask that hides the better ones from both:

    cc -shared -fPIC -O2 -DAVXVNNI=0 benchmarks/older_cpu.c -o older_cpu.so
    LD_PRELOAD=./older_cpu.so python -m benchmarks.matmul
"""

from __future__ import annotations

import argparse
import platform
import time
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.passes.int8_matmul import use_int8_matmul
from onnxport.providers.cpu.library import find_library, load_library


@dataclass(frozen=True)
class Shape:
    """A product of [rows, k] with quantized weights [n, k]."""

    k: int
    n: int
    bits: int
    layers: int

    def weight_bytes(self, block_size: int) -> int:
        """Bytes of one layer's weights with float32 scales."""
        return self.n * self.k * self.bits // 8 + self.n * -(-self.k // block_size) * 4


SHAPES = {
    "qkv": Shape(896, 1152, 4, 64),
    "o": Shape(896, 896, 4, 64),
    "gate_up": Shape(896, 9728, 4, 12),
    "down": Shape(4864, 896, 4, 24),
    "head": Shape(896, 151_936, 8, 1),
}


def build_model(shape: Shape, block_size: int) -> tuple[bytes, bytes, dict[str, NDArray]]:
    """Independent layers over one input, for ONNX Runtime and for us; their initializers."""
    rng = np.random.default_rng(0)
    blocks = -(-shape.k // block_size)
    weights: dict[str, NDArray] = {}
    nodes, tensors, outputs = [], [], []
    for i in range(shape.layers):
        blob = (shape.n, blocks, block_size * shape.bits // 8)
        weights[f"w{i}"] = rng.integers(0, 256, blob, np.uint8)
        weights[f"s{i}"] = rng.uniform(1e-3, 2e-3, (shape.n, blocks)).astype(np.float32)
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                ["x", f"w{i}", f"s{i}"],
                [f"y{i}"],
                domain="com.microsoft",
                K=shape.k,
                N=shape.n,
                bits=shape.bits,
                block_size=block_size,
                accuracy_level=4,
            )
        )
        outputs.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["rows", shape.n]))
    for name, value in weights.items():
        kind = TensorProto.UINT8 if name[0] == "w" else TensorProto.FLOAT
        tensor = TensorProto(name=name, data_type=kind, dims=value.shape)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="attached")
        tensors.append(tensor)
    graph = helper.make_graph(
        nodes,
        "products",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", shape.k])],
        outputs,
        tensors,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    ours = use_int8_matmul(model).model
    return model.SerializeToString(), ours.SerializeToString(), weights


def start(model: bytes, weights: dict[str, NDArray], threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # Else threads of the one that has just run take processors from the other one.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.register_custom_ops_library(str(find_library()))
    values = [ort.OrtValue.ortvalue_from_numpy(value) for value in weights.values()]
    options.add_external_initializers(list(weights), values)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def bind(session: ort.InferenceSession, x: NDArray, y: NDArray) -> ort.IOBinding:
    """One input, and one memory for all outputs, as a model uses its activations' again."""
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu", 0, np.float32, y.shape, y.ctypes.data)
    return binding


def seconds(binding: ort.IOBinding, session: ort.InferenceSession, busy: bool) -> float:
    clock = time.process_time if busy else time.perf_counter
    begin = clock()
    session.run_with_iobinding(binding)
    return clock() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,8,16,128,512")
    parser.add_argument("--isa", default="", help="of our operator; the best one unless given")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each line")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="count processor time, for a machine that other programs use too; one thread",
    )
    arguments = parser.parse_args()
    busy = arguments.busy
    if busy:
        arguments.threads = 1
    path = find_library()
    if path is None:
        parser.error("the operator library was not built")
    library = load_library(path)
    isas = arguments.isa.split(",") if arguments.isa else [library.onnxport_cpu_matmul_isa()]
    isas = [name if isinstance(name, bytes) else name.encode() for name in isas]
    for name in isas:
        if not library.onnxport_cpu_set_matmul_isa(name):
            parser.error(f"this processor or build has no {name.decode()}")
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads")
    for shape_name in arguments.shapes.split(","):
        shape = SHAPES[shape_name]
        theirs, ours, weights = build_model(shape, arguments.block_size)
        sessions = [start(model, weights, arguments.threads) for model in (theirs, ours)]
        for rows in (int(text) for text in arguments.rows.split(",")):
            x = np.random.default_rng(1).standard_normal((rows, shape.k), np.float32)
            y = np.zeros((rows, shape.n), np.float32)
            bindings = [bind(session, x, y) for session in sessions]
            best = [float("inf")] * (1 + len(isas))
            end = time.perf_counter() + arguments.seconds
            while time.perf_counter() < end or best[-1] == float("inf"):
                best[0] = min(best[0], seconds(bindings[0], sessions[0], busy))
                for i, name in enumerate(isas):
                    library.onnxport_cpu_set_matmul_isa(name)
                    best[1 + i] = min(best[1 + i], seconds(bindings[1], sessions[1], busy))
            line = f"{shape_name:8} {rows:4} rows"
            for name, total in zip(["ORT", *(isa.decode() for isa in isas)], best, strict=True):
                t = total / shape.layers
                gops = 2 * rows * shape.n * shape.k / t / 1e9
                gbytes = shape.weight_bytes(arguments.block_size) / t / 1e9
                line += f" | {name} {t * 1e6:8.1f} us {gops:7.0f} GOP/s {gbytes:5.1f} GB/s"
                if name != "ORT":
                    line += f" x{best[0] / total:.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
