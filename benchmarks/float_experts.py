"""Time experts whose weights are floats: our operator beside ONNX Runtime's MoE, by rows.

    python -m benchmarks.float_experts --rows 1,8,128

One layer, of OLMoE's shape unless told otherwise, with random weights in a file that is mapped.
Each step's rows go to experts of their own. The sessions take turns; times are medians over the
rounds.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.experts import ExpertWeights, Routing, expert_layer
from onnxport.graphs.passes.float_experts import use_float_experts
from onnxport.graphs.tensors import WEIGHTS_FILE, TensorRef
from onnxport.providers.cpu.library import find_library

LOGIT_SETS = 6  # so many times other experts, before the same ones come again


def build_model(folder: Path, sizes: argparse.Namespace, dtype: type) -> onnx.ModelProto:
    """A layer of experts as the exporter writes it, activations in float32; weights in `folder`."""
    rng, g, names, begin = np.random.default_rng(0), GraphBuilder("layer"), [], 0
    shapes = (
        (sizes.experts, 2 * sizes.size, sizes.hidden),
        (sizes.experts, sizes.hidden, sizes.size),
    )
    with (folder / WEIGHTS_FILE).open("wb") as file:
        for name, shape in zip(("gate_up", "down"), shapes, strict=True):
            one = (rng.standard_normal(shape[1:]) / 50).astype(dtype)
            element = helper.np_dtype_to_tensor_dtype(one.dtype)
            names.append(g.weight(TensorRef(name, element, shape, begin, one.nbytes * shape[0])))
            for _ in range(shape[0]):
                file.write(one.tobytes())
            begin += one.nbytes * shape[0]
    x = g.input("x", TensorProto.FLOAT, ["rows", sizes.hidden])
    router = g.input("router", TensorProto.FLOAT, ["rows", sizes.experts])
    weights = ExpertWeights(count=sizes.experts, gate_up=names[0], down=names[1])
    y = expert_layer(g, x, router, weights, Routing(per_token=sizes.per_token, normalized=True))
    g.output(y, TensorProto.FLOAT, ["rows", sizes.hidden])
    return g.build()


def make_session(model: onnx.ModelProto, folder: Path, threads: int) -> ort.InferenceSession:
    """A session whose weights are mapped."""
    library = find_library()
    assert library is not None, "the C++ kernels were not built"
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library))
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(folder)
    )
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def time_ms(session: ort.InferenceSession, feeds: list[dict[str, NDArray]]) -> float:
    """The median over steps, in milliseconds, once the others' threads no longer spin."""
    time.sleep(0.2)
    session.run(None, feeds[-1])
    times = []
    for feed in feeds:
        begin = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,2,8,32,128,512")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--size", type=int, default=1024, help="features between the products")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sessions = {}
        for name, dtype in (("float16", np.float16), ("float32", np.float32)):
            folder = Path(temporary, name)
            folder.mkdir()
            model = build_model(folder, sizes, dtype)
            ours = use_float_experts(model).model
            sessions[f"FloatExperts, {name}"] = make_session(ours, folder, sizes.threads)
            if dtype is np.float32:
                sessions["MoE, float32"] = make_session(model, folder, sizes.threads)
        print(f"{platform.processor() or platform.machine()}, {sizes.threads} threads")
        print(f"| rows | {' | '.join(f'{name} ms' for name in sessions)} | MoE / float16 |")
        print("|---" * (len(sessions) + 2) + "|")
        rng = np.random.default_rng(1)
        for rows in map(int, sizes.rows.split(",")):
            feeds: list[dict[str, NDArray]] = [
                {
                    "x": rng.standard_normal((rows, sizes.hidden), dtype=np.float32),
                    "router": rng.standard_normal((rows, sizes.experts), dtype=np.float32),
                }
                for _ in range(LOGIT_SETS)
            ]
            found = [
                [time_ms(session, feeds) for session in sessions.values()]
                for _ in range(sizes.rounds + 1)
            ][1:]
            medians = np.median(found, axis=0)
            cells = " | ".join(f"{one:.1f}" for one in medians)
            print(f"| {rows} | {cells} | {medians[-1] / medians[0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
