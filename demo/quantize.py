"""What int4 weight quantization does to a model, simulated in floating point."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

BLOCK = 128


def int4(weight: Tensor) -> Tensor:
    """Return `weight` [out, in] rounded to symmetric int4 in blocks of 128 inputs.

    As ONNX Runtime's MatMulNBits quantizes: the value of largest magnitude in a block becomes
    -8, `scale = value / -8`, and each weight becomes `scale * clamp(round(weight / scale), -8, 7)`.
    """
    blocks = weight.reshape(-1, BLOCK)
    extreme = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = torch.where(extreme == 0, torch.ones_like(extreme), extreme / -8)
    return (scale * (blocks / scale).round().clamp(-8, 7)).reshape_as(weight)


def straight_through_int4(weight: Tensor) -> Tensor:
    """Return `int4(weight)`, transparent to gradients (straight-through estimator)."""
    return weight + (int4(weight) - weight).detach()


@contextmanager
def int4_layers(model: nn.Module) -> Iterator[None]:
    """Compute with int4 weights in every linear layer; gradients go to the original weights."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    originals = [layer.weight.data for layer in layers]
    for layer in layers:
        layer.weight.data = int4(layer.weight.data)
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            layer.weight.data = original
