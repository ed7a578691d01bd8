"""Sessions of ONNX Runtime, and the memory that they share with NumPy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs.tensors import numpy_dtype

if TYPE_CHECKING:
    import onnx

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"
CPU_EXECUTION_PROVIDER = "CPUExecutionProvider"
ERRORS: Final = 3  # and what is worse, as ONNX Runtime counts
BFLOAT16: Final = 16  # onnx.TensorProto.BFLOAT16; importing onnx takes longer than a graph may


@dataclass(frozen=True, slots=True)
class Target:
    """The execution provider that a session runs on."""

    execution_provider: str
    memory: str = "cpu"  # the kind of its memory, as I/O binding names it
    device_id: int = 0
    options: Mapping[str, str] = field(default_factory=dict)  # of the execution provider
    ep_device: Any = None  # onnxruntime.OrtEpDevice of a plugin; None: the wheel has it built in
    sequential: bool = False  # it wants one node at a time and no memory patterns

    @property
    def is_host(self) -> bool:
        """Whether it is the CPU."""
        return self.execution_provider == CPU_EXECUTION_PROVIDER


CPU = Target(CPU_EXECUTION_PROVIDER)


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One physical cache: the graph's input and output names, and the memory behind both."""

    input_name: str
    output_name: str
    value: Any  # onnxruntime.OrtValue [num_blocks, block_size, kv_heads, head_size]


def start_session(model: bytes, folder: Path | None, options: Any, target: Target = CPU) -> Any:
    """Start a session on exactly the execution provider asked for.

    Args:
        model: a serialized ModelProto whose external data lies in `folder`.
        folder: the artifact's folder; None for a graph that has no external data.
        options: an onnxruntime.SessionOptions; entries are added to it.
        target: what runs it; ONNX Runtime leaves to the CPU what that does not take. For anything
            but the CPU, warnings of ONNX Runtime itself are off from then on in all of the process.

    Raises:
        ProviderError: ONNX Runtime refuses the graph, or starts without the execution provider.
    """
    import onnxruntime as ort

    if not target.is_host:
        ort.set_default_logger_severity(ERRORS)  # it warns of what is meant, at every start
    if folder is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    options.add_session_config_entry(RECORD_PLACEMENT, "1")
    if target.sequential:
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.enable_mem_pattern = False
    wanted = target.execution_provider
    try:
        if target.ep_device is not None:
            options.add_provider_for_devices([target.ep_device], dict(target.options))
            session = ort.InferenceSession(model, options, enable_fallback=0)
        else:
            providers = [(wanted, dict(target.options))]
            session = ort.InferenceSession(model, options, providers=providers, enable_fallback=0)
    except Exception as error:  # ONNX Runtime's own classes derive from Exception alone
        raise ProviderError(
            f"ONNX Runtime {ort.__version__} could not start the graph on {wanted}: {error}"
        ) from error
    session.disable_fallback()
    if wanted not in session.get_providers():
        raise ProviderError(
            f"{wanted} did not start; ONNX Runtime went on with "
            f"{', '.join(session.get_providers())}. Its log above says why."
        )
    return session


def quiet_options() -> Any:
    """Options of a session whose failures are raised and told in our words, not logged."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    return options


def weight_bytes(model: onnx.ModelProto, attached: Mapping[str, NDArray[Any]]) -> int:
    """Host memory that the weights of a session on the CPU take.

    ONNX Runtime holds what is stored once, packed for its kernels or mapped, even where two
    initializers share it. What a pass converted is there twice: packed, and as it was attached.
    Artifacts of every precision took this and about 40 MiB more, for the session itself.

    Args:
        model: the lowered graph.
        attached: its initializers whose contents are not in the weights file.
    """
    sizes: dict[tuple[str, str], int] = {}
    for tensor in model.graph.initializer:
        stored_at = {entry.key: entry.value for entry in tensor.external_data}
        size = math.prod(tensor.dims) * numpy_dtype(tensor.data_type).itemsize
        place = stored_at.get("location", ""), stored_at.get("offset", tensor.name)
        sizes[place] = size
    return sum(sizes.values()) + sum(value.nbytes for value in attached.values())


def ort_value(array: NDArray[Any]) -> Any:
    """An OrtValue that aliases a NumPy array on the host and keeps it alive."""
    import onnxruntime as ort

    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)
