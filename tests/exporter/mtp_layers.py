"""Checkpoints with a layer of multi-token prediction, and what PyTorch makes of that.

Transformers computes none, so a model is made one layer deeper: its last layer, with attention,
becomes that of multi-token prediction, and PyTorch puts around it what the papers say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from tests.exporter import checkpoints
from tests.exporter.checkpoints import CASES, HYBRID, OFFSET_NORMS, Case

Floats = NDArray[np.float32]
FULL = "full_attention"
_LISTS = ("layer_types", "mlp_layer_types")  # with an entry a layer
_OF_QWEN = {
    "product": "mtp.fc.weight",
    "embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "state_norm": "mtp.pre_fc_norm_hidden.weight",
    "final_norm": "mtp.norm.weight",
    "embedding": "mtp.embed_tokens.weight",
}
_OF_OTHERS = {
    "product": "eh_proj.weight",
    "embedding_norm": "enorm.weight",
    "state_norm": "hnorm.weight",
    "final_norm": "shared_head.norm.weight",
    "embedding": "embed_tokens.weight",
    "head": "shared_head.head.weight",
}


@dataclass(frozen=True)
class Mtp:
    """One checkpoint to make."""

    case: str  # of `checkpoints`: the model
    own: tuple[str, ...] = ()  # what the layer has beside the model's: embedding, head
    config: Mapping[str, Any] = field(default_factory=dict)  # what differs from the case's
    names: Mapping[str, str] = field(default_factory=dict)  # of its tensors that differ from GLM's


@dataclass(frozen=True)
class Made:
    """What was made."""

    case: Case  # the model
    deeper: PreTrainedModel  # float32, of which the last layer is that of multi-token prediction
    parts: Mapping[str, torch.Tensor]  # float32
    names: Mapping[str, str]  # of them

    def guess(self, ids: NDArray[np.int64], given: Floats, own: Floats) -> tuple[Floats, Floats]:
        """Logits, [tokens, vocab], and the layer's states, [tokens, hidden], of one sequence."""
        inner, count = _text(self.deeper), len(ids)
        table = self.parts.get("embedding", inner.embed_tokens.weight)
        head = self.parts.get("head", self.deeper.get_output_embeddings().weight)
        with torch.no_grad():
            token = self._norm(table[torch.from_numpy(ids)], "embedding_norm")
            state = self._norm(torch.from_numpy(given + own), "state_norm")
            stream = (torch.cat([token, state], -1) @ self.parts["product"].T)[None]
            places = torch.arange(count)[None]
            mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
            stream = inner.layers[-1](
                stream,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=inner.rotary_emb(stream, places),
            )
            made = self._norm(stream[0], "final_norm")
            return (made @ head.T).numpy(), made.numpy()

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.parts[name] + (self.case.family in OFFSET_NORMS)
        return rms_norm(x, (x.shape[-1],), weight, _text(self.deeper).config.rms_norm_eps)


def make(mtp: Mtp, folder: Path, seed: int = 0) -> Made:
    """Write the checkpoint."""
    case = {**CASES, **HYBRID}[mtp.case]
    config = {**case.config, **mtp.config}
    count = config.get("num_hidden_layers", checkpoints.BASE["num_hidden_layers"])
    config["num_hidden_layers"] = count + 1
    if case in HYBRID.values():
        kinds = config.get("layer_types") or ["linear_attention"] * (count - 1) + [FULL]
        config["layer_types"] = [*kinds, FULL]
    deeper = checkpoints.make(replace(case, config=config, shards=False), folder, seed)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    is_qwen = case in HYBRID.values()
    last = f".layers.{count}."
    (prefix,) = {name.partition(last)[0] + last for name in tensors if last in name}
    behind = "mtp.layers.0." if is_qwen else prefix
    moved = {
        behind + name.removeprefix(prefix) if name.startswith(prefix) else name: one
        for name, one in tensors.items()
    }
    others = {**_OF_OTHERS, **mtp.names}
    names = _OF_QWEN if is_qwen else {key: prefix + one for key, one in others.items()}
    parts = _parts(_text(deeper).config.hidden_size, case, mtp.own)
    added = {names[key]: one.to(case.dtype) for key, one in parts.items()}
    save_file(moved | added, path)
    _shorten(folder, count)
    return Made(case, deeper, {key: added[names[key]].float() for key in parts}, names)


FOLLOWED = 64  # tokens, and channels


def make_follower(mtp: Mtp, folder: Path) -> None:
    """Write a checkpoint whose next token follows from the last one, in a circle of all.

    Tokens are channels. What a layer adds is nothing, and the head moves each channel on to the
    next token, with seven in ten. So does the layer of multi-token prediction with the state beside
    the token: it says what follows on what follows on the token before.
    """
    sizes = {"vocab_size": FOLLOWED, "hidden_size": FOLLOWED, "tie_word_embeddings": False}
    made = make(replace(mtp, config={**mtp.config, **sizes}), folder)
    order = torch.randperm(FOLLOWED, generator=torch.Generator().manual_seed(3))
    follows = torch.zeros(FOLLOWED, FOLLOWED)
    follows[order.roll(-1), order] = 1.0
    path = folder / "model.safetensors"
    tensors = load_file(path)
    epsilon = _text(made.deeper).config.rms_norm_eps
    normed = (1 / FOLLOWED + epsilon) ** -0.5
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            tensor.zero_()
        elif "norm" in name and name.endswith(".weight") and tensor.shape == (FOLLOWED,):
            tensor.fill_(float(made.case.family not in OFFSET_NORMS))
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(torch.eye(FOLLOWED))
        elif name.endswith("lm_head.weight"):
            tensor.copy_(follows * 5 / normed)
        elif name == made.names["product"]:
            tensor.copy_(torch.cat([torch.zeros_like(follows), follows], 1))
    save_file(tensors, path)


def _parts(hidden: int, case: Case, own: tuple[str, ...]) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(7)
    centre = 0.0 if case.family in OFFSET_NORMS else 1.0
    found = {"product": torch.randn(hidden, 2 * hidden, generator=dice) / hidden**0.5}
    for name in ("embedding_norm", "state_norm", "final_norm"):
        found[name] = centre + torch.randn(hidden, generator=dice) / 4
    for name in own:
        found[name] = torch.randn(checkpoints.VOCAB, hidden, generator=dice) / 4
    return found


def _shorten(folder: Path, count: int) -> None:
    """Take the last layer out of the configuration."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    inner: dict[str, Any] = config.get("text_config", config)
    inner["num_hidden_layers"] = count
    for name in _LISTS:
        if name in inner:
            inner[name] = inner[name][:count]
    if inner["model_type"].startswith("qwen3_5"):
        inner["mtp_num_hidden_layers"] = 1
    elif inner["model_type"] != "qwen3_next":  # which does not say
        inner["num_nextn_predict_layers"] = 1
    path.write_text(json.dumps(config))


def _text(model: PreTrainedModel) -> Any:
    """The text model, without its head."""
    inner: Any = model.model
    return getattr(inner, "language_model", inner)
