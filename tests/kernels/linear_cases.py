"""Convolutions and gated delta nets on states in slots: random cases, and what is right of them.

Serialized for linear_driver.cpp, a case is 0 for a convolution and 1 for a delta net, its sizes as
int64, a delta net's scale as float32, and then its arrays.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.kernels import matmul_cases

Floats = NDArray[np.float32]
Wide = NDArray[np.float64]
EPSILON = 1e-6
SLOTS = 9
LENGTHS = ((1,), (1, 1, 1), (5,), (3, 0, 2), (16, 1, 17), (0,), (40, 1), (2, 33, 1, 4))
# No model's, one lane more than a register, and those of models; the last one the kernels' most.
KEY_SIZES = (1, 5, 16, 17, 64, 100, 128, 256)
VALUE_SIZES = (1, 3, 4, 6, 12, 37, 64, 128)
CHANNELS = (1, 7, 16, 33, 64, 65, 300)  # more than a task has, too


@dataclass(frozen=True)
class Slots:
    """The sequences of a step, and where their states are."""

    lengths: tuple[int, ...]  # new tokens
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def ends(self) -> list[int]:
        return np.cumsum([0, *self.lengths]).tolist()

    def feeds(self) -> dict[str, NDArray[np.int32]]:
        values = {"lengths": self.ends, "reads": self.reads, "writes": self.writes}
        return {name: np.array(value, np.int32) for name, value in values.items()}


@dataclass(frozen=True)
class ConvCase:
    """One call of onnxport.CausalConv."""

    slots: Slots
    x: Floats  # [num_tokens, channels]
    weight: Floats  # [channels, 1, taps]
    pool: Floats  # [SLOTS, channels, taps - 1]
    bias: Floats | None = None  # [channels]
    has_silu: bool = True

    def replace(self, **changes: object) -> ConvCase:
        return replace(self, **changes)  # type: ignore[arg-type]

    def tokens(self, which: Sequence[int], slots: Slots, pool: Floats) -> ConvCase:
        """The same layer for other tokens, on other states."""
        return self.replace(x=self.x[which], slots=slots, pool=pool)

    def feeds(self) -> dict[str, NDArray[Any]]:
        return {"x": self.x, **self.slots.feeds()}


@dataclass(frozen=True)
class DeltaCase:
    """One call of onnxport.GatedDeltaNet."""

    slots: Slots
    query: Floats  # [num_tokens, key_heads, key_size]
    key: Floats  # likewise
    value: Floats  # [num_tokens, value_heads, value_size]
    decay: Floats  # [num_tokens, value_heads], or of channels [num_tokens, value_heads * key_size]
    beta: Floats | None  # [num_tokens, value_heads]; None: without the delta rule
    pool: Floats  # [SLOTS, value_heads, value_size, key_size]
    a_log: Floats | None = None  # [value_heads]
    dt_bias: Floats | None = None  # with it; of decay's width
    scale: float | None = None
    is_normalized: bool = True
    has_sigmoid: bool = True
    is_packed: bool = True
    has_steps: bool = False  # values are times the softplus of decays
    has_channels: bool = False  # each channel of a key has a decay

    def replace(self, **changes: object) -> DeltaCase:
        return replace(self, **changes)  # type: ignore[arg-type]

    def tokens(self, which: Sequence[int], slots: Slots, pool: Floats) -> DeltaCase:
        """The same layer for other tokens, on other states."""
        names = ("query", "key", "value", "decay", "beta")
        given = {name: getattr(self, name) for name in names}
        chosen = {name: one[which] for name, one in given.items() if one is not None}
        return self.replace(**chosen, slots=slots, pool=pool)

    def feeds(self) -> dict[str, NDArray[Any]]:
        found = {"decay": self.decay, **self.slots.feeds()}
        parts = {"query": self.query, "key": self.key, "value": self.value}
        if self.is_packed:
            flat = [x.reshape(len(x), x.shape[1] * x.shape[2]) for x in parts.values()]
            parts = {"query": np.concatenate(flat, axis=1)}
        for name in ("beta", "a_log", "dt_bias"):
            if getattr(self, name) is not None:
                parts[name] = getattr(self, name)
        return {**parts, **found}


Case = ConvCase | DeltaCase
C = TypeVar("C", ConvCase, DeltaCase)


def make_slots(rng: np.random.Generator, lengths: Sequence[int]) -> Slots:
    """Some sequences begin, others go on; what is read may be read twice."""
    order = rng.permutation(np.arange(1, SLOTS)).tolist()
    writes, others = order[: len(lengths)], [0, *order[len(lengths) :]]
    return Slots(tuple(lengths), tuple(rng.choice(others, len(lengths)).tolist()), tuple(writes))


def _pool(rng: np.random.Generator, *shape: int) -> Floats:
    pool = rng.standard_normal((SLOTS, *shape)).astype(np.float32)
    pool[0] = 0
    return pool


def make_conv(seed: int, channels: int, taps: int, lengths: Sequence[int]) -> ConvCase:
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    return ConvCase(
        slots=make_slots(rng, lengths),
        x=numbers(sum(lengths), channels),
        weight=numbers(channels, 1, taps),
        pool=_pool(rng, channels, taps - 1),
        bias=numbers(channels) if seed % 2 else None,
        has_silu=seed % 3 > 0,
    )


def make_delta(
    seed: int, heads: tuple[int, int], sizes: tuple[int, int], lengths: Sequence[int]
) -> DeltaCase:
    """A layer of (key, value) heads and (key, value) sizes."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    (key_heads, value_heads), (key_size, value_size) = heads, sizes

    def numbers(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    return DeltaCase(
        slots=make_slots(rng, lengths),
        query=numbers(tokens, key_heads, key_size),
        key=numbers(tokens, key_heads, key_size),
        value=numbers(tokens, value_heads, value_size),
        decay=numbers(tokens, value_heads),
        beta=numbers(tokens, value_heads),
        pool=_pool(rng, value_heads, value_size, key_size),
        a_log=rng.uniform(-3, 2, value_heads).astype(np.float32),
        dt_bias=numbers(value_heads),
    )


def make_gated(
    seed: int, heads: tuple[int, int], sizes: tuple[int, int], lengths: Sequence[int]
) -> DeltaCase:
    """A state space: the same without the delta rule, and as Mamba-2 has it."""
    case = make_delta(seed, heads, sizes, lengths)
    plain = {"decay": -np.abs(case.decay), "beta": None, "a_log": None, "dt_bias": None}
    case = case.replace(**plain, has_sigmoid=False, is_normalized=False)
    shorter = np.float32(sizes[0] ** -0.5)
    return case.replace(key=case.key * shorter, scale=1.0, is_packed=False)


def make_steps(
    seed: int, heads: tuple[int, int], sizes: tuple[int, int], lengths: Sequence[int]
) -> DeltaCase:
    """A state space whose gate makes what values are multiplied with, too."""
    case = make_gated(seed, heads, sizes, lengths)
    gate = {"a_log": np.zeros(heads[1], np.float32), "dt_bias": np.full(heads[1], -1, np.float32)}
    return case.replace(**gate, decay=-case.decay, has_steps=True)


def make_channels(
    seed: int, heads: tuple[int, int], sizes: tuple[int, int], lengths: Sequence[int]
) -> DeltaCase:
    """A layer of Kimi Delta Attention: each channel of a key has a decay."""
    case, rng = make_delta(seed, heads, sizes, lengths), np.random.default_rng(seed + 1000)
    width = heads[1] * sizes[0]
    return case.replace(
        decay=rng.standard_normal((sum(lengths), width)).astype(np.float32),
        dt_bias=rng.standard_normal(width).astype(np.float32),
        has_channels=True,
    )


def random_conv(seed: int) -> ConvCase:
    rng = np.random.default_rng(seed)
    lengths = LENGTHS[seed % len(LENGTHS)]
    return make_conv(seed, int(rng.choice(CHANNELS)), int(rng.integers(2, 9)), lengths)


def random_delta(seed: int) -> DeltaCase:
    rng = np.random.default_rng(seed)
    key_heads = int(rng.integers(1, 4))
    heads = (key_heads, key_heads * int(rng.integers(1, 4)))
    sizes = (int(rng.choice(KEY_SIZES)), int(rng.choice(VALUE_SIZES)))
    case = make_delta(seed, heads, sizes, LENGTHS[seed % len(LENGTHS)])
    case = case.replace(is_packed=bool(seed % 2), scale=0.3 if seed % 3 == 1 else None)
    if seed % 8 == 2:
        return make_gated(seed, heads, sizes, LENGTHS[seed % len(LENGTHS)])
    if seed % 8 == 6:
        case = make_steps(seed, heads, sizes, LENGTHS[seed % len(LENGTHS)])
        return case.replace(has_steps=bool(seed % 3))
    if seed % 5 == 1:
        made = make_channels(seed, heads, sizes, LENGTHS[seed % len(LENGTHS)])
        case = made.replace(is_packed=case.is_packed, scale=case.scale)
    if seed % 4 == 3:
        plain = {"decay": -np.abs(case.decay), "beta": np.abs(case.beta) / 4}
        case = case.replace(**plain, a_log=None, dt_bias=None, has_sigmoid=False)
    if seed % 5 == 4:
        shorter = 1 / np.sqrt(sizes[0])
        case = case.replace(is_normalized=False, key=case.key * np.float32(shorter))
    return case


def expected(case: Case) -> tuple[Wide, Wide]:
    """The output and the pool, in float64."""
    return _convolved(case) if isinstance(case, ConvCase) else _delta_net(case)


def _convolved(case: ConvCase) -> tuple[Wide, Wide]:
    pool, output = case.pool.astype(np.float64), np.zeros(case.x.shape)
    taps = case.weight.shape[2]
    slots, ends = case.slots, case.slots.ends
    for row, (read, write) in enumerate(zip(slots.reads, slots.writes, strict=True)):
        tokens = slice(ends[row], ends[row + 1])
        inputs = np.concatenate([case.pool[read].T, case.x[tokens]]).astype(np.float64)
        for at in range(slots.lengths[row]):
            output[ends[row] + at] = (inputs[at : at + taps].T * case.weight[:, 0]).sum(1)
        pool[write] = inputs[len(inputs) - taps + 1 :].T
    if case.bias is not None:
        output += case.bias
    return output * _sigmoid(output) if case.has_silu else output, pool


def _delta_net(case: DeltaCase) -> tuple[Wide, Wide]:
    tokens, heads, size = case.value.shape
    shared = heads // case.key.shape[1]
    query, key = (x.astype(np.float64) for x in (case.query, case.key))
    if case.is_normalized:
        query, key = (x / np.sqrt((x * x).sum(-1, keepdims=True) + EPSILON) for x in (query, key))
    query = query * (case.scale or query.shape[2] ** -0.5)
    query, key = (np.repeat(x, shared, axis=1) for x in (query, key))
    width = query.shape[2] if case.has_channels else 1
    log = case.decay.astype(np.float64).reshape(tokens, heads, width)
    steps = np.ones((tokens, heads))
    if case.a_log is not None and case.dt_bias is not None:
        raw = np.logaddexp(0, log + case.dt_bias.reshape(heads, width))
        steps = raw[..., 0] if case.has_steps else steps
        log = -np.exp(case.a_log.astype(np.float64))[:, None] * raw
    beta = None if case.beta is None else case.beta.astype(np.float64)
    beta = _sigmoid(beta) if case.has_sigmoid and beta is not None else beta
    pool, output = case.pool.astype(np.float64), np.zeros((tokens, heads, size))
    slots, ends = case.slots, case.slots.ends
    for row, (read, write) in enumerate(zip(slots.reads, slots.writes, strict=True)):
        state = case.pool[read].astype(np.float64)
        for token in range(ends[row], ends[row + 1]):
            state = state * np.exp(log[token])[:, None]
            change = case.value[token] * steps[token][:, None]
            if beta is not None:
                known = np.einsum("hvk,hk->hv", state, key[token])
                change = beta[token][:, None] * (change - known)
            state = state + change[..., None] * key[token][:, None]
            output[token] = np.einsum("hvk,hk->hv", state, query[token])
        pool[write] = state
    return output, pool


def _sigmoid(x: Wide) -> Wide:
    return 1 / (1 + np.exp(-x))


def check(case: Case, found: tuple[Floats, Floats]) -> None:
    """Check output and pool; slots that are not written must have the same bits."""
    for part, wanted in zip(found, expected(case), strict=True):
        scale = max(1.0, float(np.abs(wanted).max(initial=0)))
        np.testing.assert_allclose(part, wanted, rtol=0, atol=3e-6 * scale)
    others = [slot for slot in range(SLOTS) if slot not in case.slots.writes]
    assert found[1][others].tobytes() == case.pool[others].tobytes()


def model(case: Case, **attributes: Any) -> bytes:
    """A model of the one node; `attributes` replace the node's."""
    feeds = case.feeds()
    slots = ["pool", "lengths", "reads", "writes"]
    weights: dict[str, Floats] = {}
    if isinstance(case, ConvCase):
        weights = {"weight": case.weight}
        if case.bias is not None:
            weights["bias"] = case.bias
        inputs = ["x", "weight", "bias" if case.bias is not None else "", *slots]
        channels, _, taps = case.weight.shape
        values: dict[str, Any] = {"channels": channels, "taps": taps}
        values["activation"] = "silu" if case.has_silu else "none"
        kind, rank = "CausalConv", 2
    else:
        wanted = ("query", "key", "value", "decay", "beta", "a_log", "dt_bias")
        inputs = [*(name if name in feeds else "" for name in wanted), *slots]
        values = {"qk_l2_norm": int(case.is_normalized)}
        values["update_rule"] = "gated" if case.beta is None else "gated_delta"
        values |= {"steps": 1} if case.has_steps else {}
        values |= {"channel_decay": 1} if case.has_channels else {}
        values["beta_activation"] = "sigmoid" if case.has_sigmoid else "none"
        if case.scale is not None:
            values["scale"] = case.scale
        kind, rank = "GatedDeltaNet", 3
    node = helper.make_node(
        kind, inputs, ["y", "new_pool"], domain="onnxport", **{**values, **attributes}
    )
    infos = [_info(name, value.ndim, value.dtype) for name, value in feeds.items()]
    infos.append(_info("pool", case.pool.ndim, case.pool.dtype))
    outputs = [_info("y", rank, np.float32), _info("new_pool", case.pool.ndim, np.float32)]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph([node], "linear", infos, outputs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("onnxport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _info(name: str, rank: int, dtype: Any) -> Any:
    kind = TensorProto.INT32 if dtype == np.int32 else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, kind, [f"{name}{i}" for i in range(rank)])


def run(library: Path, case: Case, threads: int = 2) -> tuple[Floats, Floats]:
    """The output, and the pool, which is bound in place."""
    session = matmul_cases.session(library, model(case), threads)
    return run_session(session, case.feeds(), case.pool)


def run_session(
    session: ort.InferenceSession, feeds: Mapping[str, NDArray[Any]], pool: Floats
) -> tuple[Floats, Floats]:
    """The output, and a copy of the pool, which is bound in place."""
    states = pool.copy()
    held = ort.OrtValue.ortvalue_from_numpy(states)  # which is in its memory
    binding = session.io_binding()
    binding.bind_output("y", "cpu")
    for name, value in feeds.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(value))
    binding.bind_ortvalue_input("pool", held)
    binding.bind_ortvalue_output("new_pool", held)
    session.run_with_iobinding(binding)
    output: Floats = binding.get_outputs()[0].numpy()
    return output, states


def run_standalone(
    command: list[str], isa: str, cases: Sequence[Case]
) -> list[tuple[Floats, Floats]]:
    """Run all cases in one process without ONNX Runtime."""
    data = struct.pack("q", len(cases)) + b"".join(_serialize(case) for case in cases)
    done = subprocess.run([*command, isa], input=data, capture_output=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    found, at = [], 0
    for case in cases:
        shape = case.x.shape if isinstance(case, ConvCase) else case.value.shape
        parts = []
        for size in (shape, case.pool.shape):
            count = int(np.prod(size))
            parts.append(np.frombuffer(done.stdout, np.float32, count, at).reshape(size))
            at += 4 * count
        found.append((parts[0], parts[1]))
    assert at == len(done.stdout)
    return found


def _serialize(case: Case) -> bytes:
    slots = case.slots
    arrays: list[NDArray[Any] | None] = [*slots.feeds().values(), case.pool]
    if isinstance(case, ConvCase):
        channels, _, taps = case.weight.shape
        has_bias = case.bias is not None
        sizes = (0, len(slots.reads), len(case.x), channels, taps, case.has_silu, has_bias)
        by_tap = np.ascontiguousarray(case.weight[:, 0].T)
        head, arrays = struct.pack("7q", *sizes), [*arrays, case.x, by_tap, case.bias]
    else:
        tokens, heads, size = case.value.shape
        key_heads, key_size = case.key.shape[1:]
        flags = (case.is_normalized, case.has_sigmoid, case.a_log is not None)
        flags = (*flags, case.beta is not None, case.has_steps, case.has_channels)
        sizes = (1, len(slots.reads), tokens, key_heads, heads, key_size, size, *flags)
        head = struct.pack("13qf", *sizes, case.scale or key_size**-0.5)
        arrays += [case.query, case.key, case.value, case.decay, case.beta]
        arrays += [case.a_log, case.dt_bias]
    content = [np.ascontiguousarray(array).tobytes() for array in arrays if array is not None]
    return head + b"".join(content)
