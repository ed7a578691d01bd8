"""Run an artifact's graphs one sequence at a time, on ONNX Runtime's CPU provider, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.experts import offsets_of
from onnxport.graphs.passes.accuracy import set_accuracy
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.passes.decompose_linear import decompose_linear
from onnxport.graphs.passes.float_experts import use_float_experts
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.split_experts import QMOE, split_experts
from onnxport.graphs.passes.state_slots import use_state_slots
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.cpu.library import find_library

Kind = Literal["gqa", "decomposed", "custom", "split"]  # split: decomposed, and its experts
Logits = NDArray[np.float32]  # [num_tokens, vocab]
BLOCK_SIZE = 4


def start(artifact: Artifact, kind: Kind, kernel: Path | None = None) -> ort.InferenceSession:
    """A session with float32 activations and, in MatMulNBits, float32 arithmetic."""
    model = artifact.load_graph("gqa" if kind == "gqa" else "paged")
    spec = artifact.manifest.model
    is_ours = spec.experts is not None and spec.hidden_act != "silu"  # ONNX Runtime has none
    has_offsets = any(any(offsets_of(one)) for one in model.graph.node if one.op_type == QMOE)
    if kind == "split" or (kind == "decomposed" and is_ours) or has_offsets:
        model = split_experts(model).model
    retyped = retype(model, artifact.read_tensor)
    model = set_accuracy(retyped.model, 1).model
    if kind in ("decomposed", "split"):
        model = decompose_linear(decompose(model).model).model
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(artifact.path)
    )
    if kind == "custom":
        model = use_state_slots(model).model
        model = use_float_experts(model).model if is_ours else model
        options.register_custom_ops_library(str(kernel))
    if retyped.attached:
        values = [ort.OrtValue.ortvalue_from_numpy(value) for value in retyped.attached.values()]
        options.add_external_initializers(list(retyped.attached), values)
    return ort.InferenceSession(
        onnx.ModelProto.SerializeToString(model), options, providers=["CPUExecutionProvider"]
    )


class Runner(Protocol):
    """One growing sequence."""

    def step(self, token_ids: NDArray[np.int64]) -> Logits: ...


class GqaRunner:
    """The GQA graph; present caches become the next step's past."""

    def __init__(self, session: ort.InferenceSession, spec: ArchSpec) -> None:
        self._session = session
        empty = np.zeros((1, spec.num_kv_heads, 0, spec.head_size), np.float32)
        self._past = {
            name: empty
            for layer in spec.cached_layers
            for name in (contract.past_key(layer), contract.past_value(layer))
        }
        self._presents = [name.replace("past_key_values", "present") for name in self._past]
        for layer in spec.linear_layers:
            assert spec.linear is not None
            conv = np.zeros((1, *spec.linear.conv_state), np.float32)
            self._past[contract.gqa_past_conv_state(layer)] = conv
            self._presents.append(contract.gqa_present_conv_state(layer))
            if spec.linear.recurrent_state is None:
                continue
            heads, value_size, key_size = spec.linear.recurrent_state
            recurrent = np.zeros((1, heads, key_size, value_size), np.float32)
            self._past[contract.gqa_past_recurrent_state(layer)] = recurrent
            self._presents.append(contract.gqa_present_recurrent_state(layer))
        self._length = 0

    def step(self, token_ids: NDArray[np.int64]) -> Logits:
        self._length += len(token_ids)
        feeds = {
            contract.INPUT_IDS: token_ids[None],
            contract.ATTENTION_MASK: np.ones((1, self._length), np.int64),
            **self._past,
        }
        logits, *caches = self._session.run([contract.LOGITS, *self._presents], feeds)
        self._past = dict(zip(self._past, caches, strict=True))
        return logits[0]


class PagedRunner:
    """The paged graph, in blocks of a shuffled order, with a second sequence in each batch."""

    def __init__(self, session: ort.InferenceSession, spec: ArchSpec) -> None:
        self._session = session
        order = np.random.default_rng(0).permutation(2 * 32).astype(np.int32)
        self._table = order.reshape(2, 32)
        self._caches = {}
        for layer in spec.cached_layers:
            heads = spec.heads_of(layer)
            shape = (order.size, BLOCK_SIZE, heads.num_kv_heads, heads.head_size)
            for name, _ in contract.cache_names(layer, spec.cache_parts):
                cache = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
                self._caches[name] = cache
        self._caches |= _states(spec)
        self._has_states = spec.linear is not None
        self._state = 0
        self._length = 0

    def step(self, token_ids: NDArray[np.int64], rows: int | None = None) -> Logits:
        """Logits of the last `rows` tokens, or of all.

        The second sequence repeats the first token, so that rows are not the whole batch. It has
        the state of a slot of its own, and the first one takes turns with two.
        """
        count, past = len(token_ids), self._length
        self._length += count
        binding = self._session.io_binding()
        inputs = {
            contract.INPUT_IDS: np.concatenate([token_ids[:1], token_ids]),
            contract.BLOCK_TABLE: self._table[::-1].copy(),
            contract.CUMULATIVE_SEQUENCE_LENGTHS: np.array([0, 1, count + 1], np.int32),
            contract.PAST_SEQUENCE_LENGTHS: np.array([0, past], np.int32),
            contract.ATTENTION_METADATA: np.array([count, past + count, 1], np.int32),
            contract.LOGITS_INDICES: np.arange(
                1 if rows is None else count + 1 - rows, count + 1, dtype=np.int32
            ),
        }
        if self._has_states:
            reads, self._state = self._state, 4 if self._state == 2 else 2
            inputs[contract.STATE_READS] = np.array([0, reads], np.int32)
            inputs[contract.STATE_WRITES] = np.array([3, self._state], np.int32)
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(contract.LOGITS)
        for name, value in self._caches.items():
            binding.bind_ortvalue_input(name, value)
            present = name.replace("past_key_values", "present").replace("past_", "present_")
            binding.bind_ortvalue_output(present, value)
        self._session.run_with_iobinding(binding)
        logits: Logits = binding.get_outputs()[0].numpy()
        return logits


def _states(spec: ArchSpec) -> dict[str, ort.OrtValue]:
    """Five slots, of which those that no step may read hold what would be seen."""
    pools = {}
    for layer in spec.linear_layers:
        assert spec.linear is not None
        for name, shape in (
            (contract.past_conv_state(layer), spec.linear.conv_state),
            (contract.past_recurrent_state(layer), spec.linear.recurrent_state),
        ):
            if shape is None:
                continue
            pool = np.full((5, *shape), 7, np.float32)
            pool[0] = 0
            pools[name] = ort.OrtValue.ortvalue_from_numpy(pool)
    return pools


class Graph:
    """One of an artifact's graphs, ready to run."""

    def __init__(self, artifact: Artifact, kind: Kind, kernel: Path | None = None) -> None:
        self._session = start(artifact, kind, kernel)
        self._spec = artifact.manifest.model
        self._runner = GqaRunner if kind == "gqa" else PagedRunner

    def sequence(self) -> Runner:
        """A new sequence."""
        return self._runner(self._session, self._spec)

    def logits(self, token_ids: NDArray[np.int64]) -> Logits:
        """Logits of every position of one sequence."""
        return self.sequence().step(token_ids)


def greedy(run: Runner, prompt: NDArray[np.int64], count: int) -> list[int]:
    """`count` tokens that follow `prompt`, each the likeliest."""
    found: list[int] = []
    token_ids = prompt
    for _ in range(count):
        found.append(int(run.step(token_ids)[-1].argmax()))
        token_ids = np.array(found[-1:], np.int64)
    return found


def check_golden(artifact: Artifact) -> None:
    """Check each graph's logits against those of the export."""
    with np.load(artifact.path / "golden.npz") as golden:
        token_ids, rows, logits = (golden[key] for key in ("token_ids", "logits_indices", "logits"))
    kernel = find_library()
    kinds: list[Kind] = [*(["gqa"] if artifact.has_gqa else []), "decomposed"]
    kinds += ["custom"] if kernel else []
    for kind in kinds:
        found = Graph(artifact, kind, kernel).logits(token_ids)[rows]
        np.testing.assert_allclose(found, logits, atol=1e-4, err_msg=kind)
