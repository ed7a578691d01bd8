"""What benchmarks/make_gguf.py writes for llama.cpp, read again with the package of its authors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

from benchmarks import make_gguf  # noqa: E402 - it needs that package

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB, EXPERTS = 64, 4, 2, 96, 32, 12
SIZE = HIDDEN // HEADS
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB,
}
Tensors = dict[str, torch.Tensor]


def layer(*, bias: bool = False, experts: int = 0) -> Tensors:
    """A model of one layer."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for name, rows in (("q", HIDDEN), ("k", KV_HEADS * SIZE), ("v", KV_HEADS * SIZE)):
        shapes[f"self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        if bias:
            shapes[f"self_attn.{name}_proj.bias"] = (rows,)
    shapes["self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
    for expert in [f"experts.{one}." for one in range(experts)] or [""]:
        shapes[f"mlp.{expert}gate_proj.weight"] = (INNER, HIDDEN)
        shapes[f"mlp.{expert}up_proj.weight"] = (INNER, HIDDEN)
        shapes[f"mlp.{expert}down_proj.weight"] = (HIDDEN, INNER)
    if experts:
        shapes["mlp.gate.weight"] = (experts, HIDDEN)
    generator = torch.Generator().manual_seed(1)
    return {
        name if name.startswith("model.") else f"model.layers.0.{name}": torch.randn(
            shape, generator=generator
        ).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def write_file(path: Path, tensors: Tensors) -> None:
    """Write a file whose header has the tensors in the order of `tensors`."""
    header, offset, parts = {}, 0, []
    for name, one in tensors.items():
        content = one.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [offset, offset + len(content)]
        header[name] = {"dtype": "BF16", "shape": list(one.shape), "data_offsets": offsets}
        offset += len(content)
        parts.append(content)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def converted(
    folder: Path, model_type: str, *files: Tensors, monkeypatch: pytest.MonkeyPatch, **config: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a checkpoint of some files, convert it, and return its tensors as floats."""
    for number, tensors in enumerate(files):
        write_file(folder / f"model-{number}.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": model_type, **config}))
    arguments = ["make_gguf", str(folder), str(folder / "model.gguf")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--matrices", "f16", "--head", "f16"])
    make_gguf.main()
    reader = gguf.GGUFReader(folder / "model.gguf")
    return {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}


def numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.float().numpy()


def neighbours(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head with those that are rotated together side by side."""
    size = len(rows) // heads
    halves = np.arange(len(rows)).reshape(heads, 2, size // 2)
    order = [h[i] for both in halves for i in range(size // 2) for h in both]
    return rows[order]


def test_what_llama_rotates_lies_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = layer(bias=True)
    found = converted(tmp_path, "llama", tensors, monkeypatch=monkeypatch)
    for kind in ("weight", "bias"):
        for name, heads in (("q", HEADS), ("k", KV_HEADS)):
            stored = numbers(tensors[f"model.layers.0.self_attn.{name}_proj.{kind}"])
            told = found[f"blk.0.attn_{name}.{kind}"]
            np.testing.assert_allclose(told, neighbours(stored, heads), rtol=1e-3, atol=1e-6)
        stored = numbers(tensors[f"model.layers.0.self_attn.v_proj.{kind}"])
        np.testing.assert_allclose(found[f"blk.0.attn_v.{kind}"], stored, rtol=1e-3, atol=1e-6)


def test_experts_in_several_files_are_one_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = layer(experts=EXPERTS)
    entries = list(tensors.items())
    half = len(entries) // 2
    files = dict(entries[:half]), dict(entries[half:])
    config = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
    found = converted(tmp_path, "olmoe", *files, monkeypatch=monkeypatch, **config)
    for part in ("gate", "up", "down"):
        stored = [
            numbers(tensors[f"model.layers.0.mlp.experts.{one}.{part}_proj.weight"])
            for one in range(EXPERTS)
        ]
        told = found[f"blk.0.ffn_{part}_exps.weight"]
        np.testing.assert_allclose(told, np.stack(stored), rtol=1e-3, atol=1e-6)


def test_experts_that_are_missing_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"num_experts": EXPERTS, "num_experts_per_tok": 2}
    tensors = layer(experts=EXPERTS)
    few = {name: one for name, one in tensors.items() if ".experts.11.up_proj" not in name}
    with pytest.raises(SystemExit, match="fewer than 12 experts"):
        converted(tmp_path, "olmoe", few, monkeypatch=monkeypatch, **config)
    few = {name: one for name, one in tensors.items() if ".experts.3.up_proj" not in name}
    with pytest.raises(SystemExit, match=r"experts\.4\.up_proj\.weight does not come behind"):
        converted(tmp_path, "olmoe", few, monkeypatch=monkeypatch, **config)
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(SystemExit, match="has no safetensors"):
        converted(tmp_path, "olmoe", monkeypatch=monkeypatch, **config)
