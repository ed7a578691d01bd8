"""The command line as a process, a tiny checkpoint, and its artifact."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.waiting import PATIENCE_S, let_httpx_wait

from ..http.scripted import SPECIAL, write_tokenizer

# A trial would choose between providers whose texts differ.
SMALL = ("--port", "0", "--threads", "1", "--kv-cache-tokens", "1024", "--no-trial")
VOCAB = 257 + len(SPECIAL)
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 32, 64, 2, 2, 1, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": VOCAB - 3,
}


@pytest.fixture(scope="session", autouse=True)
def _patient_clients() -> None:
    let_httpx_wait()


def command(*arguments: str | Path) -> list[str]:
    """Return how to run onnxport."""
    return [sys.executable, "-m", "onnxport", *map(str, arguments)]


@contextmanager
def serving(*arguments: str | Path, **environment: str) -> Iterator[tuple[str, list[str]]]:
    """Give the address of a server and what it says; it must end in order."""
    process = subprocess.Popen(
        command("serve", *arguments, *SMALL),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    said: list[str] = []
    address = ""
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line)
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            address = found[0]
            break
    try:
        assert address, said
        yield address, said
    finally:
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, rest) == (0, "")


def onnxport(
    *arguments: str | Path, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run onnxport and return what became of it."""
    return subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **environment},
    )


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write a random Llama with a byte-level tokenizer and a chat template."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * 2 / columns**0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_SIZE, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_SIZE),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _nothing_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep exported models and trials in a folder of the session's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXPORT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of its artifact, exported by the command."""
    folder = tmp_path_factory.mktemp("artifacts") / "tiny"
    done = onnxport("export", checkpoint, folder, "--precision", "int4", "--group-size", "32")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Wrote {folder}.\n"
    return folder
