"""A paged graph on ONNX Runtime: the part that every execution provider shares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers.base import Capabilities, StepInputs
from onnxport.providers.transfers import CLOSED, Blocks, HostTransfers

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One physical cache: the graph's input and output names, and the memory behind both."""

    input_name: str
    output_name: str
    value: Any  # onnxruntime.OrtValue [num_blocks, block_size, kv_heads, head_size]


def start_session(
    model: bytes, folder: Path, options: Any, providers: Sequence[str | tuple[str, dict[str, Any]]]
) -> Any:
    """Start a session on exactly the execution providers asked for.

    Args:
        model: a serialized ModelProto whose external data lies in `folder`.
        folder: the artifact's folder.
        options: an onnxruntime.SessionOptions; entries are added to it.
        providers: in order of preference.

    Raises:
        ProviderError: ONNX Runtime refuses the graph, or starts without one of `providers`.
    """
    import onnxruntime as ort

    options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    options.add_session_config_entry(RECORD_PLACEMENT, "1")
    wanted = [name if isinstance(name, str) else name[0] for name in providers]
    try:
        session = ort.InferenceSession(model, options, providers=list(providers))
    except Exception as error:  # ONNX Runtime's own classes derive from Exception alone
        raise ProviderError(
            f"ONNX Runtime {ort.__version__} could not start the graph on {', '.join(wanted)}: "
            f"{error}"
        ) from error
    session.disable_fallback()
    missing = [name for name in wanted if name not in session.get_providers()]
    if missing:
        raise ProviderError(
            f"{', '.join(missing)} did not start; ONNX Runtime went on with "
            f"{', '.join(session.get_providers())}. Its log above says why."
        )
    return session


def weight_bytes(model: onnx.ModelProto, attached: Mapping[str, NDArray[Any]]) -> int:
    """Host memory that the weights of a session on the CPU take.

    ONNX Runtime holds what is stored once, packed for its kernels or mapped, even where two
    initializers share it. What a pass converted is there twice: packed, and as it was attached.
    Artifacts of every precision took this and about 40 MiB more, for the session itself.

    Args:
        model: the lowered graph.
        attached: its initializers whose contents are not in the weights file.
    """
    sizes: dict[str, int] = {}
    for tensor in model.graph.initializer:
        stored_at = {entry.key: entry.value for entry in tensor.external_data}
        size = math.prod(tensor.dims) * numpy_dtype(tensor.data_type).itemsize
        sizes[stored_at.get("offset", tensor.name)] = size
    return sum(sizes.values()) + sum(value.nbytes for value in attached.values())


def placement(session: Any) -> Mapping[str, int]:
    """How many nodes each execution provider really runs."""
    nodes: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        nodes[subgraph.ep_name] += len(subgraph.get_nodes())
    return dict(nodes)


class OrtModel(HostTransfers):
    """A started session with its KV cache; implements `providers.base.Model`.

    Caches are bound once as input and as output, so a step updates them in place. Inputs and
    logits stay in host memory.
    """

    def __init__(
        self,
        session: Any,
        capabilities: Capabilities,
        caches: Sequence[CacheTensor],
        blocks: Blocks,
        attached: Mapping[str, Any] | None = None,
    ) -> None:
        """Bind the caches.

        Args:
            session: an onnxruntime.InferenceSession of a paged graph.
            capabilities: what was loaded.
            caches: the KV caches of all layers.
            blocks: the memory of the same caches; it keeps that alive.
            attached: initializers that the session reads from the caller's memory.
        """
        super().__init__(blocks, capabilities.kv_block_bytes)
        self._session = session
        self._attached = attached or {}
        self._capabilities = capabilities
        self._binding = session.io_binding()
        self._input_names = {node.name for node in session.get_inputs()}
        self._logits = np.empty((0, capabilities.vocab_size), np.float32)
        for cache in caches:
            self._binding.bind_ortvalue_input(cache.input_name, cache.value)
            self._binding.bind_ortvalue_output(cache.output_name, cache.value)

    @property
    def capabilities(self) -> Capabilities:
        """What was really loaded."""
        return self._capabilities

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `providers.base.Model.run`."""
        if self._session is None:
            raise ProviderError(CLOSED)
        rows = len(inputs.logits_indices)
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._capabilities.vocab_size), np.float32)
        logits = self._logits[:rows]
        for name, array in (
            (contract.INPUT_IDS, inputs.input_ids),
            (contract.BLOCK_TABLE, inputs.block_table),
            (contract.CUMULATIVE_SEQUENCE_LENGTHS, inputs.cumulative_sequence_lengths),
            (contract.PAST_SEQUENCE_LENGTHS, inputs.past_sequence_lengths),
            (contract.ATTENTION_METADATA, inputs.attention_metadata),
            (contract.LOGITS_INDICES, inputs.logits_indices),
        ):
            if name in self._input_names:
                self._binding.bind_cpu_input(name, array)
        self._binding.bind_output(
            contract.LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data
        )
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:
            raise ProviderError(
                f"{self._capabilities.provider} failed while running a batch of "
                f"{len(inputs.input_ids)} tokens: {error}"
            ) from error
        return logits

    def close(self) -> None:
        """See `providers.base.Model.close`."""
        self._binding = None
        self._session = None
        self._blocks = None
        self._attached = {}
