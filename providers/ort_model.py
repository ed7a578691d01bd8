"""A paged graph that runs on ONNX Runtime; implements `providers.base.Model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.lora import TOKEN_SLOTS, LoraAdapter
from onnxport.providers.adapters import Adapters, Values, refuse_slots
from onnxport.providers.base import Capabilities, StepInputs
from onnxport.providers.failures import device_error
from onnxport.providers.hidden_states import HiddenStates, join_states
from onnxport.providers.memory_plan import MEMORY_PLAN, plan_dimension
from onnxport.providers.ort import CacheTensor
from onnxport.providers.states import check_states
from onnxport.providers.transfers import CLOSED, Blocks, Transfers

if TYPE_CHECKING:
    from onnxport.providers.buckets import Buckets, PaddedStep
    from onnxport.providers.device_logits import DeviceLogits
    from onnxport.providers.replay import DecodeReplay
    from onnxport.providers.step_memory import StepMemory


class OrtModel(Transfers):
    """A started session with its KV cache.

    Caches stay where they are, on the host or a device, and are bound once as input and as
    output, so a step updates them in place. Inputs come from host memory and logits go there.
    """

    def __init__(
        self,
        session: Any,
        capabilities: Capabilities,
        caches: Sequence[CacheTensor],
        blocks: Blocks,
        attached: Mapping[str, Any] | None = None,
        buckets: Buckets | None = None,
        replay: DecodeReplay | None = None,
        adapters: Adapters | None = None,
        *,
        is_host: bool = False,
        step_memory: StepMemory | None = None,
        device_logits: DeviceLogits | None = None,
        most_row_tokens: int | None = None,
    ) -> None:
        """Bind the caches.

        Args:
            session: an onnxruntime.InferenceSession of a paged graph.
            capabilities: what was loaded.
            caches: the KV caches of all layers, and the pools of states of those that have none.
            blocks: the memory of the same caches; it keeps that alive.
            attached: initializers that the session reads from the caller's memory.
            buckets: pad steps to these shapes; there are their spare blocks behind the pool.
            replay: runs decode steps, and only these are padded then.
            adapters: the slots for LoRA adapters; None: the graph has none.
            is_host: the session computes in host memory, and so reads inputs where they are bound.
            step_memory: runs steps that would take more in parts; None: steps take what they take.
            device_logits: where logits are left, to bring to the host what is needed of them; None:
                the session itself brings all of them.
            most_row_tokens: new tokens that a run of the session takes of a row; None: any number.
        """
        super().__init__(blocks, capabilities.kv_block_bytes, capabilities.device)
        self._session = session
        self._attached = attached or {}
        self._capabilities = capabilities
        self._buckets = buckets
        self._replay = replay
        self._step_memory = step_memory
        self._device_logits = device_logits
        self._most_row_tokens = most_row_tokens
        self._adapters = adapters
        self._bound: Values | None = None  # weights of adapters
        self._run_options = None
        if replay is not None:
            from onnxport.providers.replay import NO_GRAPH, run_options

            self._run_options = run_options(NO_GRAPH)
        self._binding = session.io_binding()
        self._input_names = {node.name for node in session.get_inputs()}
        self._takes_exact_logits = contract.EXACT_LOGITS in self._input_names
        # Of the second group of layers and those behind it.
        self._tables = [contract.block_table(i) for i in range(1, len(capabilities.windows))]
        self._all_logits = np.zeros(0, np.int32)  # as EXACT_LOGITS: all of each row
        # As ALLOWED_TOKENS: all of each row.
        self._all_tokens = np.zeros((0, contract.mask_words(capabilities.vocab_size)), np.int32)
        self._no_races = np.zeros((0, 2))  # as RACES
        self._summarizes = contract.SUMMARY_SCALES in self._input_names
        self._no_scales = np.zeros(0, np.float32)  # as SUMMARY_SCALES: nothing of any row
        self._no_summaries = self._summaries = np.zeros((0, 0), np.float32)
        states = HiddenStates(session)
        self._states = None if states.are_none else states
        self._plan: int | None = None  # the dimension that is bound
        self._logits = np.empty((0, capabilities.vocab_size), np.float32)
        self._bound_logits: NDArray[np.float32] | None = None  # the front of them
        self._progress = 0
        self._inputs: dict[str, NDArray[Any]] | None = {} if is_host else None
        for cache in caches:
            self._binding.bind_ortvalue_input(cache.input_name, cache.value)
            self._binding.bind_ortvalue_output(cache.output_name, cache.value)

    @property
    def capabilities(self) -> Capabilities:
        """What was really loaded."""
        return self._capabilities

    @property
    def progress(self) -> int:
        """Grows when a step begins and when it ends: odd while one runs. From any thread."""
        return self._progress

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `providers.base.Model.run`."""
        if self._session is None:
            raise ProviderError(CLOSED)
        if self._adapters is None:
            refuse_slots(inputs)
        check_states(inputs, self._capabilities.state_slots)
        self._progress += 1
        try:
            if self._most_row_tokens is not None:
                return self._run_chunks(inputs, self._most_row_tokens)
            return self._run_rows(inputs)
        except (ProviderError, AssertionError):
            raise
        except Exception as error:
            doing = f"running a batch of {len(inputs.input_ids)} tokens"
            raise device_error(error, doing, self._device) from error
        finally:
            self._progress += 1

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        """See `providers.base.Model.set_adapter`."""
        if self._session is None:
            raise ProviderError(CLOSED)
        if self._adapters is None:
            return super().set_adapter(slot, adapter)
        self._adapters.put(slot, adapter)

    def _run_chunks(self, inputs: StepInputs, most_tokens: int) -> NDArray[np.float32]:
        """Run as many new tokens of each row as a run takes, then the next ones of those left."""
        from onnxport.providers.chunk_steps import chunk_parts, cut

        new = np.diff(inputs.cumulative_sequence_lengths).tolist()
        if self._buckets is None:
            runs = cut(new, most_tokens)
        else:
            runs = cut(new, most_tokens, width=self._buckets.row_width)
        if len(runs) == 1:
            return self._run_rows(inputs)
        limits = self._capabilities
        if inputs.summaries is not None:
            inputs.summaries[:, -1] = contract.NO_SUMMARY
        logits = np.empty((len(inputs.logits_indices), limits.vocab_size), np.float32)
        for part, tokens, own in chunk_parts(inputs, runs, limits.block_size):
            logits[own] = self._run_rows(part)[: len(own)]
            if inputs.hidden_states is not None:
                assert part.hidden_states is not None
                inputs.hidden_states[tokens] = part.hidden_states
        return logits

    def _run_rows(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run a step whole, or in ranges of rows where it would take too much memory."""
        if self._step_memory is not None:
            ranges = self._step_memory.split(inputs)
            if len(ranges) > 1:
                return self._run_parts(inputs, ranges)
        return self._run_whole(inputs)

    def _run_whole(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits = self._run_padded(inputs)
        if self._states is not None:
            self._states.deliver(inputs)
        return logits

    def _run_padded(self, inputs: StepInputs) -> NDArray[np.float32]:
        if self._replay is not None and len(inputs.input_ids) == len(inputs.block_table):
            step = self._padded(inputs)
            used = None if self._adapters is None else self._adapters.step(step.inputs)
            self._replay.run(step, used)
            return self._fetched(inputs)
        if self._replay is not None or self._buckets is None:
            logits = self._compute(inputs)
        else:
            step = self._padded(inputs)
            logits = self._compute(step.inputs, step.query_tile)
        if logits is None:
            return self._fetched(inputs)
        return logits[: len(inputs.logits_indices)]

    def _fetched(self, inputs: StepInputs) -> NDArray[np.float32]:
        """What a step needs of logits that were left on the device."""
        assert self._device_logits is not None
        return self._device_logits.fetch(len(inputs.logits_indices), inputs)

    def _run_parts(
        self, inputs: StepInputs, ranges: Sequence[tuple[int, int]]
    ) -> NDArray[np.float32]:
        """Run ranges of rows one after the other."""
        from onnxport.providers.step_memory import parts_of

        limits = self._capabilities
        assert not self._takes_exact_logits, "our kernels alone do, and they take steps whole"
        if inputs.summaries is not None:
            inputs.summaries[:, -1] = contract.NO_SUMMARY
        logits = np.empty((len(inputs.logits_indices), limits.vocab_size), np.float32)
        for part, own in parts_of(inputs, ranges, limits.block_size):
            logits[own] = self._run_whole(part)[: len(own)]
            join_states(inputs, part, own)
        return logits

    def _padded(self, inputs: StepInputs) -> PaddedStep:
        # A device's: what pads, and the graphs it pads for, are not imported on a processor.
        from onnxport.providers.buckets import pad

        assert self._buckets is not None
        limits = self._capabilities
        return pad(inputs, self._buckets, limits.num_blocks, limits.state_slots + 1)

    def _compute(self, inputs: StepInputs, query_tile: int = 1) -> NDArray[np.float32] | None:
        """Run a step from and to host memory; `query_tile` is for graphs that want it.

        Returns:
            Its logits; None where they are left on the device.
        """
        if self._adapters is not None:
            self._bind_adapters(self._adapters, inputs)
        for name, array in (
            (contract.INPUT_IDS, inputs.input_ids),
            (contract.BLOCK_TABLE, inputs.block_table),
            (contract.CUMULATIVE_SEQUENCE_LENGTHS, inputs.cumulative_sequence_lengths),
            (contract.PAST_SEQUENCE_LENGTHS, inputs.past_sequence_lengths),
            (contract.ATTENTION_METADATA, inputs.attention_metadata),
            (contract.LOGITS_INDICES, inputs.logits_indices),
        ):
            if name in self._input_names:
                self._bind_input(name, array)
        assert len(inputs.more_block_tables) == len(self._tables), "each group has a block table"
        for name, table in zip(self._tables, inputs.more_block_tables, strict=True):
            self._bind_input(name, table)
        if inputs.state_reads is not None and inputs.state_writes is not None:
            self._bind_input(contract.STATE_READS, inputs.state_reads)
            self._bind_input(contract.STATE_WRITES, inputs.state_writes)
        if contract.QUERY_TILE in self._input_names:
            self._bind_input(contract.QUERY_TILE, np.zeros(query_tile, np.int8))
        if self._takes_exact_logits:
            exact, allowed = inputs.exact_logits, inputs.allowed_tokens
            if exact is None:
                if len(self._all_logits) != len(inputs.logits_indices):
                    self._all_logits = np.zeros(len(inputs.logits_indices), np.int32)
                exact = self._all_logits
            self._bind_input(contract.EXACT_LOGITS, exact)
            self._bind_input(
                contract.ALLOWED_TOKENS, self._all_tokens if allowed is None else allowed
            )
            races = inputs.races
            self._bind_input(contract.RACES, self._no_races if races is None else races)
        if self._summarizes:
            self._bind_summaries(inputs)
        if self._states is not None:
            self._states.bind(self._binding, inputs, self._bind_input)
        if MEMORY_PLAN in self._input_names:
            dimension = plan_dimension(
                inputs,
                has_slots=self._adapters is not None,
                per_logit=1 + self._summarizes + self._num_asked(inputs),
            )
            self._bind_plan(dimension)
        logits = None
        if self._device_logits is None:
            logits = self._bind_logits(len(inputs.logits_indices))
        else:
            self._device_logits.bind(self._binding, len(inputs.logits_indices))
        self._session.run_with_iobinding(self._binding, self._run_options)
        return logits

    def _num_asked(self, inputs: StepInputs) -> int:
        """How many inputs tell of each row which logits are wanted."""
        if not self._takes_exact_logits:
            return 0
        return 1 + (inputs.allowed_tokens is not None) + (inputs.races is not None)

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
        """Let the next run read the array; a device copies it now.

        A session that reads host memory reads the array itself, so the one that is bound already,
        with what is in it by now, is not bound again.
        """
        if self._inputs is None:
            self._binding.bind_cpu_input(name, array)
        elif self._inputs.get(name) is not array:
            assert array.flags.c_contiguous, "else a copy would be bound"
            self._binding.bind_cpu_input(name, array)
            self._inputs[name] = array

    def _bind_logits(self, rows: int) -> NDArray[np.float32]:
        """The memory that logits of so many rows go to."""
        if len(self._logits) < rows:
            self._logits = _whole_lines(rows, self._capabilities.vocab_size)
            self._bound_logits = None
        if self._bound_logits is None or rows != len(self._bound_logits):
            self._bound_logits = self._logits[:rows]
            shape, address = self._bound_logits.shape, self._bound_logits.ctypes.data
            self._binding.bind_output(contract.LOGITS, "cpu", 0, np.float32, shape, address)
        return self._bound_logits

    def _bind_summaries(self, inputs: StepInputs) -> None:
        """Let the next run tell what is asked for."""
        scales, summaries = inputs.summary_scales, inputs.summaries
        if scales is None or summaries is None:
            rows = len(inputs.logits_indices)
            if len(self._no_scales) != rows:
                floats = contract.summary_floats(self._capabilities.vocab_size)
                self._no_scales = np.full(rows, contract.NO_SUMMARY, np.float32)
                self._no_summaries = np.empty((rows, floats), np.float32)
            scales, summaries = self._no_scales, self._no_summaries
        self._bind_input(contract.SUMMARY_SCALES, scales)
        if summaries is not self._summaries:
            self._binding.bind_output(
                contract.LOGITS_SUMMARIES,
                "cpu",
                0,
                np.float32,
                summaries.shape,
                summaries.ctypes.data,
            )
            self._summaries = summaries

    def _bind_adapters(self, adapters: Adapters, inputs: StepInputs) -> None:
        step = adapters.step(inputs)
        if step.values is not self._bound:
            for name, value in step.values.items():
                self._binding.bind_ortvalue_input(name, value)
            self._bound = step.values
        self._bind_input(TOKEN_SLOTS, step.token_slots)

    def _bind_plan(self, dimension: int) -> None:
        if dimension != self._plan:
            self._binding.bind_cpu_input(MEMORY_PLAN, np.empty((dimension, 0), np.int8))
            self._plan = dimension

    def close(self) -> None:
        """See `providers.base.Model.close`."""
        # Memory of a device goes before the last session that runs on it.
        self._binding = None
        self._bound = None
        self._adapters = None
        self._session = None
        self._replay = None
        if self._device_logits is not None:
            self._device_logits.close()
        self._device_logits = None
        self._blocks = None
        self._attached = {}


def _whole_lines(rows: int, columns: int) -> NDArray[np.float32]:
    """Memory for float32 [rows, columns] that begins with a cache line.

    A vector that is stored there in a row of whole lines is in one of them.
    """
    line, size = 64, rows * columns
    memory = np.empty(size + line // 4, np.float32)
    first = -memory.ctypes.data % line // 4
    return memory[first : first + size].reshape(rows, columns)
