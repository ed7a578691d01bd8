"""K/V blocks from one provider to another: prefill on one, decode on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxport.kv.table import blocks_for
from onnxport.providers.base import Model
from onnxport.providers.rows import convert
from onnxport.serving.verify.decoding import Tokens
from onnxport.serving.verify.prompts import Prompt
from onnxport.serving.verify.sequence import LoneSequence
from onnxport.serving.verify.variants import Variant, judge


@dataclass(frozen=True, slots=True)
class SavedPrompt:
    """A prompt that one provider has computed."""

    prompt: Prompt
    first_token: int  # that it chose after the prompt
    cache: NDArray[np.generic]  # [num_layers, parts, num_kv_heads, num_tokens, elements]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Tokens that one provider decoded from the K/V of another."""

    source: str  # the provider that computed the prompts
    arithmetic: str  # in which they were decoded, as the mode's tolerance names it
    tokens: Variant  # against those of the source alone


def save_prompt(model: Model, prompt: Prompt) -> SavedPrompt:
    """Compute a prompt and read its blocks."""
    sequence = LoneSequence(model, len(prompt))
    logits = sequence.step(prompt, [len(prompt) - 1])
    first_token = int(logits[0].argmax())
    blocks = read_layers(model, sequence.tables)
    shape = blocks.shape
    joined = np.moveaxis(blocks, 0, 3).reshape(*shape[1:4], -1, shape[5])
    return SavedPrompt(prompt, first_token, joined[:, :, :, : len(prompt)].copy())


def resume(model: Model, saved: SavedPrompt, num_new: int) -> Tokens:
    """Write the blocks of a prompt and decode greedily from there.

    Returns:
        `num_new` tokens, the first of which the source chose.
    """
    sequence = LoneSequence(model, len(saved.prompt) + num_new, reverse=True)
    size = model.capabilities.block_size
    write_layers(model, sequence.tables, convert(_split(saved.cache, size), _cache_dtype(model)))
    sequence.num_computed = len(saved.prompt)
    tokens = [saved.first_token]
    while len(tokens) < num_new:
        tokens.append(int(sequence.step(tokens[-1:], [0])[0].argmax()))
    return tuple(tokens)


def check_transfer(
    source: str,
    saved: Sequence[SavedPrompt],
    expected: Mapping[Prompt, Tokens],
    model: Model,
    arithmetic: str,
    allowed: float,
) -> Transfer:
    """Decode from the blocks of `source`; the tokens must be those that it gives alone.

    Args:
        source: name of the provider that saved the prompts.
        saved: its prompts; those that do not fit `model` were left out.
        expected: its tokens of each.
        model: that decodes.
        arithmetic: in which it does.
        allowed: see `comparison.tie_limit`.

    Raises:
        ProviderError: the device failed.
    """
    found = [(one.prompt, resume(model, one, len(expected[one.prompt]))) for one in saved]
    return Transfer(source, arithmetic, judge("transfer", model, expected, found, allowed))


def read_layers(model: Model, tables: Sequence[Sequence[int]]) -> NDArray[np.generic]:
    """Read all layers' blocks: [n, layers, parts, heads, block_size, head_size]."""
    groups = [model.read_blocks(table) for table in tables]
    places = model.capabilities.kv_format.places
    if not places:
        return groups[0]
    return np.stack([groups[group][:, place] for group, place in places], axis=1)


def write_layers(
    model: Model, tables: Sequence[Sequence[int]], blocks: NDArray[np.generic]
) -> None:
    """Write what `read_layers` returned to the first blocks of each group; where no layer is, 0."""
    form = model.capabilities.kv_format
    if not form.places:
        model.write_blocks(tables[0][: len(blocks)], blocks)
        return
    for group, table in enumerate(tables):
        content = np.zeros((len(blocks), form.num_layers, *blocks.shape[2:]), blocks.dtype)
        for layer, (owner, place) in enumerate(form.places):
            if owner == group:
                content[:, place] = blocks[:, layer]
        model.write_blocks(table[: len(blocks)], content)


def _split(cache: NDArray[np.generic], block_size: int) -> NDArray[np.generic]:
    """Cut a sequence's K/V into canonical blocks; the rest of the last one is 0."""
    layers, parts, heads, num_tokens, head_size = cache.shape
    count = blocks_for(num_tokens, block_size)
    padded = np.zeros((layers, parts, heads, count * block_size, head_size), cache.dtype)
    padded[:, :, :, :num_tokens] = cache
    blocks = padded.reshape(layers, parts, heads, count, block_size, head_size)
    return np.ascontiguousarray(np.moveaxis(blocks, 3, 0))


def _cache_dtype(model: Model) -> np.dtype[np.generic]:
    """What the model's canonical blocks are made of."""
    return model.read_blocks([0]).dtype
