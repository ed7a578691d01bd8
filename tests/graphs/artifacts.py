"""A small decoder written as an artifact, for the tests of the reader and of retype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.graphs import attention_ops, ops
from onnxport.graphs import contract as c
from onnxport.graphs.artifact import Artifact, Manifest, Source
from onnxport.graphs.artifact_writer import ArtifactWriter
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec

VOCAB, HIDDEN, BLOCK = 96, 128, 32

SPEC = ArchSpec(
    family="llama",
    num_layers=2,
    hidden_size=HIDDEN,
    intermediate_size=HIDDEN,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    vocab_size=VOCAB,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    context_length=64,
    sliding_window=(None, 8),
    rope=RopeSpec(type="default", theta=1e4, rotary_dim=32),
)

LATENT = LatentSpec(kv_rank=32, nope_size=16, rope_size=8, value_size=24)
OF_LATENTS = replace(
    SPEC,
    num_kv_heads=1,
    head_size=40,
    rope=RopeSpec(type="default", theta=1e4, rotary_dim=8),
    sliding_window=(None, None),
    qkv_bias=False,
    qk_norm=False,
    attention_scale=0.2,
    latent=LATENT,
)

MANIFEST = Manifest(
    model=SPEC,
    precision="int4",
    group_size=BLOCK,
    head_precision="int4",
    activation_dtype="float16",
    source=Source("example/tiny", "0123abc"),
    eos_token_ids=(1, 2),
    bos_token_id=0,
)


class Decoder:
    """Attention only, which is enough: embedding, two layers, tied head."""

    def __init__(self, writer: ArtifactWriter, quantized: bool) -> None:
        self.g = GraphBuilder("paged")
        self.writer = writer
        self.quantized = quantized
        self.random = np.random.default_rng(0)

    def weight(self, name: str, value: NDArray[Any], dtype: Any = np.float16) -> str:
        return self.g.weight(self.writer.add_weight(name, value.astype(dtype)))

    def draw(self, *shape: int) -> NDArray[np.float32]:
        return (self.random.standard_normal(shape) * 0.1).astype(np.float32)

    def linear(self, name: str, x: str, n: int, bias: str = "") -> str:
        if not self.quantized:
            return ops.linear(self.g, x, self.weight(f"{name}.weight", self.draw(HIDDEN, n)), bias)
        data = self.random.integers(0, 256, (n, HIDDEN // BLOCK, BLOCK // 2), dtype=np.uint8)
        weight = self.weight(f"{name}.weight", data, np.uint8)
        scales = self.weight(f"{name}.scales", np.abs(self.draw(n, HIDDEN // BLOCK)) / 8)
        return ops.matmul_nbits(
            self.g, x, weight, scales, k=HIDDEN, n=n, bits=4, block_size=BLOCK, bias=bias
        )

    def embed(self) -> tuple[str, tuple[str, str]]:
        """The rows of the embedding, and the head's weights."""
        if not self.quantized:
            table = self.draw(VOCAB, HIDDEN)
            name = self.weight("embed.weight", table)
            return self.g.node("Gather", [name, c.INPUT_IDS], name="embed"), (name, "")
        data = self.random.integers(0, 256, (VOCAB, HIDDEN // BLOCK, BLOCK // 2), dtype=np.uint8)
        ref = self.writer.add_weight("head.weight", data)
        scales = self.weight("head.scales", np.abs(self.draw(VOCAB, HIDDEN // BLOCK)) / 8)
        table = self.g.weight(ref.view("embed.weight", (VOCAB, HIDDEN // 2)))
        x = ops.gather_block_quantized(
            self.g, table, c.INPUT_IDS, scales, bits=4, block_size=BLOCK, name="embed"
        )
        return x, (self.g.weight(ref), scales)

    def build(self) -> onnx.ModelProto:
        g, int32 = self.g, TensorProto.INT32
        g.input(c.INPUT_IDS, TensorProto.INT64, [c.NUM_TOKENS])
        g.input(c.BLOCK_TABLE, int32, [c.BATCH, c.MAX_NUM_BLOCKS])
        g.input(c.CUMULATIVE_SEQUENCE_LENGTHS, int32, [c.BATCH_PLUS_ONE])
        g.input(c.PAST_SEQUENCE_LENGTHS, int32, [c.BATCH])
        g.input(c.ATTENTION_METADATA, int32, [3])
        g.input(c.LOGITS_INDICES, int32, [c.NUM_LOGITS])
        shape = [c.NUM_BLOCKS, c.BLOCK_SIZE, SPEC.num_kv_heads, SPEC.head_size]
        for layer in range(SPEC.num_layers):
            for name in (c.past_key, c.past_value):
                g.input(name(layer), TensorProto.FLOAT16, shape)
        angles = np.outer(np.arange(SPEC.context_length), 1e4 ** -(np.arange(16) / 16))
        tables = {
            name: ops.cast(
                g, self.weight(name, value, np.float32), TensorProto.FLOAT16, f"{name}.f16"
            )
            for name, value in (("cos", np.cos(angles)), ("sin", np.sin(angles)))
        }
        x, head = self.embed()
        for layer in range(SPEC.num_layers):
            with g.scope(f"layers.{layer}"):
                x = self.layer(layer, x, tables)
        rows = g.node("Gather", [x, c.LOGITS_INDICES], name="rows")
        if self.quantized:
            logits = ops.matmul_nbits(
                g, rows, *head, k=HIDDEN, n=VOCAB, bits=4, block_size=BLOCK, name="head"
            )
        else:
            logits = g.node("Gemm", [rows, head[0]], name="head", transB=1)
        g.node("Cast", [logits], outputs=[c.LOGITS], name="logits", to=TensorProto.FLOAT)
        g.output(c.LOGITS, TensorProto.FLOAT, [c.NUM_LOGITS, VOCAB])
        for layer in range(SPEC.num_layers):
            for name in (c.present_key, c.present_value):
                g.output(name(layer), TensorProto.FLOAT16, shape)
        return g.build()

    def layer(self, layer: int, x: str, tables: dict[str, str]) -> str:
        g = self.g
        norm = self.weight(f"layers.{layer}.norm", 1 + self.draw(HIDDEN))
        normed, total = ops.skip_rms_norm(g, x, x, norm, SPEC.rms_norm_eps)
        bias = self.weight(f"layers.{layer}.qkv.bias", self.draw(SPEC.qkv_size))
        qkv = self.linear(f"layers.{layer}.qkv", normed, SPEC.qkv_size, bias)
        out = attention_ops.paged_attention(
            g,
            qkv,
            c.cache_names(layer, 2),
            cumulative_sequence_lengths=c.CUMULATIVE_SEQUENCE_LENGTHS,
            past_sequence_lengths=c.PAST_SEQUENCE_LENGTHS,
            block_table=c.BLOCK_TABLE,
            attention_metadata=c.ATTENTION_METADATA,
            attributes=attention_ops.AttentionAttributes(
                num_heads=SPEC.num_heads,
                kv_num_heads=SPEC.num_kv_heads,
                local_window_size=SPEC.sliding_window[layer],
            ),
            **tables,
        )
        projected = self.linear(f"layers.{layer}.o", out, HIDDEN)
        return g.node("Add", [total, projected], name="residual")


def write(path: Path, *, quantized: bool = True, **writer: Any) -> Path:
    """Write the decoder to `path` with a tokenizer file."""
    with ArtifactWriter(path, **writer) as w:
        model = Decoder(w, quantized).build()
        w.write_graph("paged", model)
        w.write_bytes("tokenizer.json", b"{}")
        precision = {} if quantized else {"precision": "fp16", "head_precision": "fp16"}
        fields: dict[str, Any] = precision | ({} if quantized else {"group_size": None})
        return w.commit(replace(MANIFEST, **fields))


def step_inputs(new: list[int], past: list[int]) -> dict[str, NDArray[Any]]:
    """A packed batch over 12 blocks of 8 tokens, in a shuffled order."""
    r = np.random.default_rng(7)
    width = -(-(max(np.add(new, past))) // 8)
    ids = r.permutation(12)[: width * len(new)].reshape(len(new), width)
    cumulative = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return {
        c.INPUT_IDS: r.integers(0, VOCAB, sum(new)),
        c.BLOCK_TABLE: ids.astype(np.int32),
        c.CUMULATIVE_SEQUENCE_LENGTHS: cumulative,
        c.PAST_SEQUENCE_LENGTHS: np.array(past, np.int32),
        c.ATTENTION_METADATA: np.array([0, 0, 0], np.int32),
        c.LOGITS_INDICES: cumulative[1:] - 1,
    }


def caches(dtype: Any) -> dict[str, NDArray[Any]]:
    """Filled pools of 12 blocks of 8 tokens."""
    r = np.random.default_rng(8)
    shape = (12, 8, SPEC.num_kv_heads, SPEC.head_size)
    return {
        name(layer): (r.standard_normal(shape) * 0.1).astype(np.float16).astype(dtype)
        for layer in range(SPEC.num_layers)
        for name in (c.past_key, c.past_value)
    }


def reads(artifact: Artifact) -> dict[str, NDArray[Any]]:
    """Every initializer of the paged graph."""
    graph = artifact.load_graph("paged").graph
    return {tensor.name: artifact.read_tensor(tensor) for tensor in graph.initializer}
