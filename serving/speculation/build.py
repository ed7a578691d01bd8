"""From a speculation config to a speculator, the draft model loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from onnxport.errors import ArtifactError
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import open_model
from onnxport.serving.fallback import describe
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.draft_model import ModelDrafter
from onnxport.serving.speculation.forced import ForcedDrafter
from onnxport.serving.speculation.ngram import NgramDrafter
from onnxport.serving.speculation.speculator import Speculator
from onnxport.serving.tokenizer import TOKENIZER_FILE, Tokenizer

logger = logging.getLogger(__name__)

DRAFT_KV_MEMORY = 0.1  # of the free memory
# Of weights, that one thread has read before another one is awake: threads sleep between two runs,
# and a draft is many short ones.
FEW_BYTES = 1 << 20


def build_speculator(
    config: SpeculationConfig,
    target: Path,
    provider: str,
    max_num_batched_tokens: int,
    trials: Path | None = None,
    shared: LoadOptions | None = None,
) -> Speculator:
    """Return what guesses for the model in `target`; a draft model is loaded.

    Args:
        config: how to guess.
        target: the artifact folder of the model that checks.
        provider: what a draft model runs on if the config does not say.
        max_num_batched_tokens: most tokens that a draft model computes to catch up with a request.
        trials: folder of measured trials for the provider "auto", see `open_model`.
        shared: options of the target, of which a draft model takes over what is not the device's:
            `graph_cache` and `coarse_head`.

    Raises:
        ArtifactError: a folder is not a valid artifact, or the two have not the same tokens.
        ProviderError: the provider cannot run the draft model.
        CapacityError: it does not fit the memory.
    """
    if config.method == "grammar":
        return Speculator(ForcedDrafter(), config)
    if config.model is None:
        ngrams = NgramDrafter(config.prompt_lookup_max, config.prompt_lookup_min)
        return Speculator(ForcedDrafter(ngrams), config)
    check_same_tokens(target, config.model)
    shared = shared or LoadOptions()
    threads = config.threads or _default_threads(config.model)
    options = LoadOptions(
        threads=threads,
        kv_cache_tokens=config.kv_cache_tokens,
        kv_memory=DRAFT_KV_MEMORY if config.kv_cache_tokens is None else None,
        graph_cache=shared.graph_cache,
        coarse_head=shared.coarse_head,
        hybrid_kv_cache=False,  # a draft model's rows have one block table
    )
    model = open_model(config.model, config.provider or provider, options, trials)
    logger.info("loaded the draft model %s", describe(model.capabilities))
    vocab_size = Artifact.read(target, check_graphs=False).manifest.model.vocab_size
    drafter = ModelDrafter(model, max_num_batched_tokens, vocab_size, threads)
    return Speculator(drafter, config)


def _default_threads(draft: Path) -> int | None:
    """Return how many threads a draft model gets if nobody says; None: the provider's choice."""
    weights = Artifact.read(draft, check_graphs=False).manifest.files[WEIGHTS_FILE]
    return 1 if weights.size <= FEW_BYTES else None


def check_same_tokens(target: Path, draft: Path) -> None:
    """Raise ArtifactError unless a token means the same to both models.

    Vocabularies may be padded to different sizes, as those of some model families are.
    """
    ours, theirs = (Artifact.read(path, check_graphs=False) for path in (target, draft))
    if not (ours.path / TOKENIZER_FILE).is_file() or not (theirs.path / TOKENIZER_FILE).is_file():
        sizes = ours.manifest.model.vocab_size, theirs.manifest.model.vocab_size
        if sizes[0] != sizes[1]:
            raise ArtifactError(
                f"{target} has {sizes[0]} tokens and the draft model {draft} has {sizes[1]}, and "
                "there are no two tokenizers to compare; take a draft model with the same tokenizer"
            )
        return
    if (ours.path / TOKENIZER_FILE).read_bytes() == (theirs.path / TOKENIZER_FILE).read_bytes():
        return
    left = Tokenizer.from_folder(ours.path, frozenset()).vocabulary()
    right = Tokenizer.from_folder(theirs.path, frozenset()).vocabulary()
    if left != right:
        token, number = min(left.items() ^ right.items(), key=lambda item: (item[1], item[0]))
        raise ArtifactError(
            f"the draft model {draft} has another tokenizer than {target}: {len(right)} tokens and "
            f"{len(left)}, of which the first to differ is {token!r}, number {number}; take a "
            "draft model with the same tokenizer, most often a smaller one of the same family"
        )
