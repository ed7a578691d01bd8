"""LoRA adapters on OpenVINO: with our own operator where it can be used, else in standard ones."""

from __future__ import annotations

from typing import Any, Final

from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.host_lora import HostLora
from onnxport.providers.openvino.extension import Extension, Loaded
from onnxport.providers.openvino.model import tensors_of

ATTRIBUTES: Final = (  # of AddLora
    *("offset", "ranks", "max_rank", "columns0", "columns1", "columns2"),
    *("bits", "block_size", "adapter_bits"),  # of adapters in integers
)


class OpenVinoLora(HostLora):
    """See `HostLora`. Adapters have the types of the `cpu` provider, whose kernel computes them."""

    def __init__(
        self, artifact: Artifact, options: LoadOptions, extension: Extension | None
    ) -> None:
        """Load nothing yet.

        Args:
            artifact: what is loaded.
            options: with `max_adapters` of at least 1.
            extension: see `extension.load_extension`; None: standard operators.
        """
        self._extension = extension
        self._loaded = None if extension is None else Loaded(extension)
        place = self._loaded or tensors_of
        super().__init__(artifact, options, place, custom=extension is not None)

    def convert(self, node: Any) -> list[Any]:
        """AddLora as a product and what our operator adds to it.

        The rest of the node's inputs, RANKS, WEIGHTS and SCALES, are handed over in another way.
        """
        import openvino.opset15 as ops

        assert self._extension is not None
        assert self._loaded is not None
        product, activations, slots = (node.get_input(index) for index in range(3))
        attributes = {name: node.get_attribute(name, 0) for name in ATTRIBUTES}
        attributes["model"] = self._loaded.model
        delta = self._extension.node(activations, slots, attributes)
        return [ops.add(product, delta).output(0)]
