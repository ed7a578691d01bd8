"""Compiled paged graphs with their caches; implements `providers.base.Model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.lora import TOKEN_SLOTS, LoraAdapter
from onnxport.graphs.passes import flat_paged
from onnxport.providers.adapters import Adapters, Arrays, Values, refuse_slots
from onnxport.providers.base import Capabilities, StepInputs
from onnxport.providers.failures import device_error
from onnxport.providers.openvino.compiled import bind_caches
from onnxport.providers.openvino.states import RowStates
from onnxport.providers.openvino.tensors import TensorPair
from onnxport.providers.states import check_states
from onnxport.providers.transfers import CLOSED, Blocks, Transfers


@dataclass(frozen=True, slots=True)
class Graph:
    """One compilation of the artifact's graph."""

    compiled: Any  # openvino.CompiledModel
    most_tokens: int | None  # that one run of it should have; None: any number
    adapted: bool = False  # it has inputs for LoRA adapters, which cost time when none is used


class OpenVinoModel(Transfers):
    """Inference requests whose cache inputs are bound for good; OpenVINO writes into them."""

    def __init__(
        self,
        graphs: Sequence[Graph],
        capabilities: Capabilities,
        pairs: Sequence[TensorPair],
        blocks: Blocks,
        memory: Sequence[Any],
        adapters: Adapters | None = None,
        layers: Sequence[int] | None = None,
        states: RowStates | None = None,
    ) -> None:
        """Bind the caches.

        Args:
            graphs: with caches of one format; a batch runs on the first that it fits, and on one
                with adapters only if it uses some or there is no other.
            capabilities: what was loaded.
            pairs: the caches of each layer.
            blocks: the same memory, for transfers.
            memory: what the weights point to; kept as long as the compiled model.
            adapters: the slots for LoRA adapters, made of `tensors_of`; None: no graph has any.
            layers: those that have caches; None: all.
            states: of those that have none; None: all have. Steps are cut into chunks then.
        """
        super().__init__(blocks, capabilities.kv_block_bytes, capabilities.device)
        self._requests = [(graph, graph.compiled.create_infer_request()) for graph in graphs]
        # Positions are not there where nothing rotates within attention.
        self._taken = [_names(graph.compiled.inputs) for graph in graphs]
        self._capabilities = capabilities
        self._adapters = adapters
        self._states = states
        self._bound: dict[int, Values] = {}  # weights of adapters, by the request's number
        self._kept: tuple[Sequence[TensorPair], Sequence[Any]] = (pairs, memory)
        self._logits = np.empty((0, capabilities.vocab_size), np.float32)
        for _, request in self._requests:
            bind_caches(request, pairs, range(len(pairs)) if layers is None else layers)

    @property
    def capabilities(self) -> Capabilities:
        """What was really loaded."""
        return self._capabilities

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `providers.base.Model.run`."""
        if not self._requests:
            raise ProviderError(CLOSED)
        if self._adapters is None:
            refuse_slots(inputs)
        check_states(inputs, self._capabilities.state_slots)
        if self._states is None:
            return self._run_whole(inputs)
        from onnxport.graphs.passes.chunk_linear import CHUNK_TOKENS
        from onnxport.providers.chunk_steps import chunk_parts, cut

        new = np.diff(inputs.cumulative_sequence_lengths).tolist()
        runs = cut(new, CHUNK_TOKENS, most_rows=self._states.most_rows)
        if len(runs) == 1:
            return self._run_whole(inputs)
        rows, limits = len(inputs.logits_indices), self._capabilities
        logits = np.empty((rows, limits.vocab_size), np.float32)
        for part, _, own in chunk_parts(inputs, runs, limits.block_size):
            logits[own] = self._run_whole(part)[: len(own)]
        return logits

    def _run_whole(self, inputs: StepInputs) -> NDArray[np.float32]:
        import openvino as ov

        num_tokens = len(inputs.input_ids)
        number = self._choose(inputs)
        graph, request = self._requests[number]
        rows = len(inputs.logits_indices)
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._capabilities.vocab_size), np.float32)
        logits = self._logits[:rows]
        reads, writes = inputs.state_reads, inputs.state_writes
        try:
            for name, array in flat_inputs(inputs, self._capabilities.block_size).items():
                if name in self._taken[number]:
                    request.set_tensor(name, ov.Tensor(array))
            if self._adapters is not None and graph.adapted:
                self._bind_adapters(self._adapters, number, inputs)
            if self._states is not None and reads is not None and writes is not None:
                self._states.bind(request, reads, writes)
            request.set_tensor(contract.LOGITS, ov.Tensor(logits, shared_memory=True))
            request.infer()
            if self._states is not None and writes is not None:
                self._states.keep(writes)
        except ProviderError:
            raise
        except Exception as error:
            doing = f"running a batch of {num_tokens} tokens with OpenVINO"
            raise device_error(error, doing, self._device) from error
        return logits

    def _choose(self, inputs: StepInputs) -> int:
        """The number of the graph that a batch runs on."""
        adapted = inputs.adapter_slots is not None and bool(inputs.adapter_slots.any())
        return next(
            number
            for number, (graph, _) in enumerate(self._requests)
            if (graph.most_tokens is None or len(inputs.input_ids) <= graph.most_tokens)
            and (graph.adapted or not adapted)
        )

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        """See `providers.base.Model.set_adapter`."""
        if not self._requests:
            raise ProviderError(CLOSED)
        if self._adapters is None:
            return super().set_adapter(slot, adapter)
        self._adapters.put(slot, adapter)

    def _bind_adapters(self, adapters: Adapters, number: int, inputs: StepInputs) -> None:
        import openvino as ov

        step, (_, request) = adapters.step(inputs), self._requests[number]
        if step.values is not self._bound.get(number):
            for name, value in step.values.items():
                request.set_tensor(name, value)
            self._bound[number] = step.values
        request.set_tensor(TOKEN_SLOTS, ov.Tensor(step.token_slots))

    def close(self) -> None:
        """See `providers.base.Model.close`."""
        self._requests = []
        self._blocks = None
        self._adapters = None
        self._bound = {}
        self._kept = ((), ())
        self._states = None


def flat_inputs(inputs: StepInputs, block_size: int) -> dict[str, NDArray[Any]]:
    """A batch as a flattened graph takes it: by name, without the caches."""
    past, begins = inputs.past_sequence_lengths, inputs.cumulative_sequence_lengths
    new = np.diff(begins)
    shift = np.repeat((past - begins[:-1]).astype(np.int64), new)
    used = -(-(past + new) // block_size)
    table = inputs.block_table
    return {
        contract.INPUT_IDS: inputs.input_ids,
        contract.CUMULATIVE_SEQUENCE_LENGTHS: begins,
        contract.PAST_SEQUENCE_LENGTHS: past,
        contract.LOGITS_INDICES: inputs.logits_indices,
        flat_paged.POSITIONS: np.arange(len(inputs.input_ids)) + shift,
        flat_paged.BLOCK_INDICES: table[np.arange(table.shape[1]) < used[:, None]],
        flat_paged.BLOCK_INDICES_BEGINS: np.cumsum([0, *used], dtype=np.int32),
        contract.QUERY_TILE: np.zeros(inputs.attention_metadata[0], np.int8),
        flat_paged.MAX_CONTEXT_LEN: inputs.attention_metadata[1:2].reshape(()),
    }


def _names(ports: Sequence[Any]) -> frozenset[str]:
    """What inputs of a compiled model are called."""
    return frozenset(name for port in ports for name in port.get_names())


def tensors_of(arrays: Arrays) -> Values:
    """Arrays as openvino.Tensor over the same memory, which they keep alive."""
    import openvino as ov

    return {name: ov.Tensor(array, shared_memory=True) for name, array in arrays.items()}
