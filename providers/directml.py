"""The `directml` provider: any Direct3D 12 GPU on Windows.

DirectML has no paged attention, and compiles its operators for each shape: the graph is
decomposed, with bounds that are shapes, and a step is padded to one of few sizes. Nor has it ONNX's
Gelu, which is written out.
"""

from __future__ import annotations

import platform
from typing import Final

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import Device, LoadOptions, Probe
from onnxport.providers.device import load_on_device, no_native_blocks, why_not_started
from onnxport.providers.features import Features
from onnxport.providers.imports import unless_interrupted, unless_left_behind
from onnxport.providers.ort import Target
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.recipe import Recipe

EXECUTION_PROVIDER: Final = "DmlExecutionProvider"
INSTALL: Final = "pip install 'onnxport[directml]'"
DTYPES: Final = ("float16", "float32")
EXPECTED_ON_HOST: Final = frozenset({"GatherBlockQuantized"})


class DirectMLProvider:
    """Loads artifacts on one adapter.

    Args:
        device: its number, as DXGI enumerates adapters.
        emulate: let the CPU stand in for it.
    """

    name = "directml"

    def __init__(self, device: str = "0", *, emulate: bool = False) -> None:
        if not device.isdecimal():
            raise ProviderError(
                f"directml:{device} does not name an adapter; give its number, as in directml:0"
            )
        self._device_id = int(device)
        self._emulate = emulate

    def probe(self) -> Probe:
        """See `providers.base.Provider.probe`."""
        if platform.system() != "Windows":
            return Probe(False, f"DirectML runs on Windows only, and this is {platform.system()}")
        try:
            import onnxruntime as ort

            unless_left_behind(ort)
        except ImportError as error:
            unless_interrupted(error)
            return Probe(False, f"onnxruntime is missing ({error}): {INSTALL}")
        versions = {"onnxruntime": ort.__version__}
        if EXECUTION_PROVIDER not in ort.get_available_providers():
            reason = f"onnxruntime {ort.__version__} has no DirectML execution provider: {INSTALL}"
            return Probe(False, reason, (), versions)
        devices = (Device(self._name, None, "gpu"),)
        if reason := why_not_started(self._target()):
            advice = "DirectML needs a Direct3D 12 adapter and its driver"
            return Probe(False, f"{reason}. {advice}", devices, versions)
        return Probe(True, "", devices, versions, (), Features.one_type(("decomposed",), DTYPES))

    def load(self, artifact: Artifact, options: LoadOptions) -> OrtModel:
        """See `providers.base.Provider.load`."""
        if not self._emulate and (reason := self.probe().reason):
            raise ProviderError(reason)
        recipe = Recipe(
            provider=self.name,
            device=f"{self._name}, emulated on the CPU" if self._emulate else self._name,
            dtypes=DTYPES,
            native=None,
            native_block_size=no_native_blocks,
            bucketed=True,
            shares_caches=False,
            has_gelu=False,
            expected_on_host=EXPECTED_ON_HOST,
        )
        return load_on_device(artifact, options, recipe, self._target(), emulate=self._emulate)

    @property
    def _name(self) -> str:
        return f"Direct3D 12 adapter {self._device_id}"

    def _target(self) -> Target:
        options = {"device_id": str(self._device_id)}
        # What DirectML asks of a session: no memory patterns, nothing in parallel.
        return Target(EXECUTION_PROVIDER, "dml", self._device_id, options, sequential=True)
