"""How much of what the processor can do at most is reached: reading weights, multiplying int8.

    python -m benchmarks.limits ARTIFACT --rounds 5

Each round measures the limits (limits.cpp, compiled for this processor), and then runs a fresh
process of `benchmarks.run_onnxport`, so that both meet the machine in one mood. A decode step reads
all weights once, or of an int8 head, where it is coarse, half and here and there a panel, which is
not counted; decode is measured with such a head and without. A prefill multiplies each weight with
every token's activations, attention not counted. AMX tiles are not among the limits, so that
prefill can come out above 1 where they exist.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import onnx

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.experts import bits_of, offsets_of
from onnxport.graphs.inspect import attribute_int, initializers, input_at
from onnxport.serving.verify.machine import this_machine

SOURCE = Path(__file__).with_name("limits.cpp")
ROOT = SOURCE.parents[1]
HEAD = "head"  # the product whose outputs are logits; prefill needs it once


def build(folder: Path) -> Path:
    """Compile the program that measures the limits."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        sys.exit("there is no C++ compiler; install g++ or clang++")
    program = folder / "limits"
    flags = ["-O3", "-march=native", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(program)], check=True)
    return program


def products(artifact: Path) -> Iterator[tuple[str, int, int, int, int, bool]]:
    """Name, inputs, outputs, bits and block size of each product with quantized weights.

    And whether it has zero points, or, of experts, offsets. Of experts those that one token is
    given to.
    """
    graph: onnx.ModelProto = Artifact.read(artifact).load_graph("paged")
    tensors = initializers(graph)
    for node in graph.graph.node:
        if node.op_type == "MatMulNBits":
            values = (attribute_int(node, name, 4) for name in ("K", "N", "bits", "block_size"))
            k, n, bits, size = values
            yield node.output[0], k, n, bits, size, bool(input_at(node, 3))
        if node.op_type == "QMoE":
            block = attribute_int(node, "block_size", 4)
            of_each = zip((2, 5), bits_of(node), offsets_of(node), strict=True)
            for place, bits, offsets in of_each:
                _, rows, columns = tensors[node.input[place]].dims
                outputs = rows * attribute_int(node, "k", 1)
                yield node.output[0], columns * 8 // bits, outputs, bits, block, bool(offsets)


def read_bytes(artifact: Path, *, coarse: bool) -> int:
    """What a step reads: quantized weights, and of each block a scale, and a zero point if any.

    Both are of two bytes, as they are packed: the exponents of MXFP4, a byte in the artifact, too.

    Args:
        artifact: the model.
        coarse: whether a head of 8 bits is read as one of 4.
    """
    total = 0
    for name, k, n, bits, size, has_zeros in products(artifact):
        read_bits = 4 if coarse and name.startswith(HEAD) else bits
        total += n * k * read_bits // 8 + n * -(-k // size) * (4 if has_zeros else 2)
    return total


def token_operations(artifact: Path) -> int:
    """Multiplications and additions of a token in all products but the head's."""
    return sum(2 * k * n for name, k, n, *_ in products(artifact) if not name.startswith(HEAD))


def run(command: list[str]) -> list[dict[str, float]]:
    """The JSON lines that a command prints; its errors go to ours."""
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def by_workload(command: list[str]) -> dict[str, dict[str, float]]:
    """The figures that a runner prints."""
    return {str(one.pop("workload")): one for one in run(command)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    artifact = arguments.artifact.resolve()
    whole, coarse = (read_bytes(artifact, coarse=is_coarse) for is_coarse in (False, True))
    operations = token_operations(artifact)
    if not operations:
        sys.exit(
            f"{artifact} has no quantized weights; the limits are of reading these, and of "
            "multiplying int8. Give a model that was exported with --precision int4 or int8."
        )
    runner = [sys.executable, "-m", "benchmarks.run_onnxport", str(artifact)]
    runner += ["--threads", str(arguments.threads), "--workloads"]
    shares: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for _ in range(arguments.rounds):
            limits = run([str(program), str(arguments.threads)])[0]
            exact = by_workload([*runner, "W1", "--no-coarse-head"])
            rate = exact["W1"]["decode_tok_s"] * whole / 1e9
            note(shares, "W1 decode, whole head, GB/s", rate, limits["read_gb_s"])
            found = by_workload([*runner, "W1,W4"])
            rate = found["W1"]["decode_tok_s"] * coarse / 1e9
            note(shares, "W1 decode, GB/s", rate, limits["read_gb_s"])
            for name in ("W1", "W4") if "int8" in limits else ():
                rate = found[name]["prefill_tok_s"] * operations / 1e9
                note(shares, f"{name} prefill, 10^9 int8 operations/s", rate, limits["int8"])
    machine = this_machine()
    print(f"{machine.processor}, {arguments.threads} threads; medians of {arguments.rounds} rounds")
    print(
        f"weights of a step {coarse / 1e6:.0f} MB, {whole / 1e6:.0f} with a whole head; operations "
        f"of a token {operations / 1e9:.2f}e9"
    )
    for name, values in shares.items():
        print(f"{name:45} {median(values):.2f}")


def note(shares: dict[str, list[float]], name: str, reached: float, limit: float) -> None:
    """Keep a share, and say what it is made of."""
    print(f"  {name}: {reached:.1f} of {limit:.1f}", flush=True)
    shares.setdefault(f"{name}: share of the limit", []).append(reached / limit)


if __name__ == "__main__":
    main()
