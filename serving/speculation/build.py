"""From a speculation config to a speculator, the draft model loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ArtifactError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.manifest import DRAFT_TOKENS, MTP_FOLDER
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import LoadOptions
from onnxport.providers.registry import open_model
from onnxport.serving.fallback import describe
from onnxport.serving.speculation.config import SpeculationConfig, SpeculationMethod
from onnxport.serving.speculation.draft_model import ModelDrafter
from onnxport.serving.speculation.forced import ForcedDrafter
from onnxport.serving.speculation.head import HeadDrafter, Reads
from onnxport.serving.speculation.ngram import NgramDrafter
from onnxport.serving.speculation.speculator import Speculator
from onnxport.serving.speculation.suffix import SuffixDrafter
from onnxport.serving.tokenizer import TOKENIZER_FILE, Tokenizer

logger = logging.getLogger(__name__)

DRAFT_KV_SHARE = 0.1  # of the free memory
# Of weights, that one thread has read before another one is awake: threads sleep between two runs,
# and a draft is many short ones.
FEW_BYTES = 1 << 20
HEADS: Final[tuple[SpeculationMethod, ...]] = ("eagle3", "mtp")  # methods that read states


def build_speculator(
    config: SpeculationConfig,
    target: Path,
    provider: str,
    max_num_batched_tokens: int,
    trials: Path | None = None,
    shared: LoadOptions | None = None,
    *,
    recomputes: bool = False,
) -> Speculator:
    """Return what guesses for the model in `target`; a draft model is loaded.

    Args:
        config: how to guess, as `located` returns it.
        target: the artifact folder of the model that checks.
        provider: what a draft model runs on if the config does not say.
        max_num_batched_tokens: most tokens that a draft model computes to catch up with a request.
        trials: folder of measured trials for the provider "auto", see `open_model`.
        shared: options of the target, of which a draft model takes over what is not the device's:
            `graph_cache` and `coarse_head`.
        recomputes: see `Speculator`; so it is where the target has states.

    Raises:
        ArtifactError: a folder is not a valid artifact, or the two have not the same tokens.
        ProviderError: the provider cannot run the draft model.
        CapacityError: it does not fit the memory.
    """
    if config.method == "grammar":
        return Speculator(ForcedDrafter(), config, recomputes=recomputes)
    if config.method == "suffix":
        suffixes = _suffix_drafter(config)
        return Speculator(ForcedDrafter(suffixes), config, recomputes=recomputes)
    if config.model is None:
        ngrams = NgramDrafter(*config.ngrams)
        return Speculator(ForcedDrafter(ngrams), config, recomputes=recomputes)
    check_draft(config, target)
    shared = shared or LoadOptions()
    threads = config.threads or _default_threads(config.model)
    options = LoadOptions(
        threads=threads,
        kv_cache_tokens=config.kv_cache_tokens,
        kv_cache_dtype=config.kv_cache_dtype or "auto",
        max_model_len=config.max_model_len,
        kv_share=DRAFT_KV_SHARE,
        graph_cache=shared.graph_cache,
        coarse_head=shared.coarse_head,
        hybrid_kv_cache=False,  # a draft model's rows have one block table
    )
    head = _spec(config.model).draft
    # What "auto" tries is a model by itself, which a head is not: it takes the first that can.
    trials = trials if head is None else None
    model = open_model(config.model, config.provider or provider, options, trials)
    logger.info("loaded the draft model %s", describe(model.capabilities))
    vocab_size = _spec(target).vocab_size
    if head is None:
        drafter = ModelDrafter(model, max_num_batched_tokens, vocab_size, threads)
        return Speculator(drafter, config, recomputes=recomputes)
    tokens = read_draft_tokens(config.model)
    reads = Reads(head.features, _spec(config.model).hidden_size, head.is_mtp)
    reader = HeadDrafter(model, tokens, reads, max_num_batched_tokens, vocab_size, threads)
    return Speculator(reader, config, reader=reader, recomputes=recomputes)


def _suffix_drafter(config: SpeculationConfig) -> SuffixDrafter:
    drafter = SuffixDrafter(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
        most_answers=config.suffix_decoding_max_cached_requests,
        most_tokens=config.suffix_decoding_max_cached_tokens,
    )
    if drafter.answers is not None:
        logger.info(
            "answers are kept to guess others by: the last %d, of at most %d tokens in all, in "
            "%.0f MiB of memory at most",
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_cached_tokens,
            drafter.answers.num_bytes / 2**20,
        )
    return drafter


def located(config: SpeculationConfig, target: Path) -> SpeculationConfig:
    """Return the config with the folder of what guesses, where the model has it in its own.

    Args:
        config: how to guess.
        target: the artifact folder of the model that checks.

    Raises:
        ArtifactError: a folder is not a valid artifact, or the model has no such layer.
    """
    if config.method != "mtp":
        return config
    folder = config.model or target
    if _spec(folder).draft is not None:
        return config
    inner = folder / MTP_FOLDER
    if not inner.is_dir():
        raise ArtifactError(
            f"the speculation method mtp needs the model's layer of multi-token prediction, and "
            f"{folder} has none in {MTP_FOLDER}; export the model again with --mtp, if its "
            "checkpoint has such a layer, or take another method"
        )
    return replace(config, model=inner)


def telling(config: SpeculationConfig, options: LoadOptions) -> LoadOptions:
    """Return the options by which a model tells the states that are read to guess.

    Args:
        config: how to guess, as `located` returns it.
        options: of the model.

    Raises:
        ArtifactError: the head's folder is not a valid artifact.
    """
    if config.method not in HEADS or config.model is None:
        return options
    head = _spec(config.model).draft
    if head is None:  # `check_draft` refuses it
        return options
    if head.is_mtp:
        return replace(options, final_states=True)
    return replace(options, hidden_layers=head.target_layers)


def _default_threads(draft: Path) -> int | None:
    """Return how many threads a draft model gets if nobody says; None: the provider's choice."""
    manifest = Artifact.read(draft, check_graphs=False).manifest
    return 1 if manifest.weight_bytes <= FEW_BYTES else None


def read_draft_tokens(head: Path) -> NDArray[np.int32]:
    """Return the token of each logit of a head, int32 [logits].

    Raises ArtifactError where the file is missing or damaged.
    """
    spec, path = _spec(head), head / DRAFT_TOKENS
    try:
        tokens: NDArray[np.int32] = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); export the head again") from error
    if tokens.shape != (spec.num_logits,) or tokens.dtype != np.int32:
        raise ArtifactError(
            f"{path} holds {tokens.dtype} {list(tokens.shape)}, and the head has {spec.num_logits} "
            "logits; export it again"
        )
    is_known = tokens.min() >= 0 and tokens.max() < spec.vocab_size
    if not is_known or len(np.unique(tokens)) < len(tokens):
        raise ArtifactError(f"{path} names a token twice, or none of the model's; export it again")
    return tokens


def _spec(path: Path) -> ArchSpec:
    return Artifact.read(path, check_graphs=False).manifest.model


def check_draft(config: SpeculationConfig, target: Path) -> None:
    """Raise ArtifactError unless what guesses is what the method needs, and fits the model."""
    assert config.model is not None
    head = _spec(config.model).draft
    if _spec(config.model).linear is not None:
        raise ArtifactError(
            f"{config.model} has layers that keep states, which cannot go back behind "
            "guesses that prove wrong; take a draft model that has attention alone"
        )
    kind, method = _kind(head)
    if method != config.method:
        raise ArtifactError(
            f"{config.model} is {kind}, which the speculation method {config.method} cannot use; "
            f"the method for it is {method}"
        )
    if head is not None:
        spec, ours = _spec(config.model), _spec(target)
        for what, made_for, found in (
            ("layers", head.target_num_layers, ours.num_layers),
            ("numbers in a hidden state", head.target_hidden_size, ours.hidden_size),
            ("tokens", spec.vocab_size, ours.vocab_size),
        ):
            if made_for != found:
                raise ArtifactError(
                    f"the head {config.model} is for a model of {made_for} {what}, and {target} "
                    f"has {found}; take a head that was trained for this model"
                )
    check_same_tokens(target, config.model)


def _kind(head: DraftSpec | None) -> tuple[str, SpeculationMethod]:
    """What an artifact is, and the method for it; None: it is no head."""
    if head is None:
        return "a model", "draft_model"
    kind = "a layer of multi-token prediction" if head.is_mtp else "a draft head"
    return kind, head.method


def check_same_tokens(target: Path, draft: Path, role: str = "draft model") -> None:
    """Raise ArtifactError unless a token means the same to both models; `role` is the second's.

    Vocabularies may be padded to different sizes, as those of some model families are.
    """
    ours, theirs = (Artifact.read(path, check_graphs=False) for path in (target, draft))
    if not (ours.path / TOKENIZER_FILE).is_file() or not (theirs.path / TOKENIZER_FILE).is_file():
        sizes = ours.manifest.model.vocab_size, theirs.manifest.model.vocab_size
        if sizes[0] != sizes[1]:
            raise ArtifactError(
                f"{target} has {sizes[0]} tokens and the {role} {draft} has {sizes[1]}, and there "
                f"are no two tokenizers to compare; take a {role} with the same tokenizer"
            )
        return
    if (ours.path / TOKENIZER_FILE).read_bytes() == (theirs.path / TOKENIZER_FILE).read_bytes():
        return
    left = Tokenizer.from_folder(ours.path, frozenset()).vocabulary()
    right = Tokenizer.from_folder(theirs.path, frozenset()).vocabulary()
    if left != right:
        token, number = min(left.items() ^ right.items(), key=lambda item: (item[1], item[0]))
        raise ArtifactError(
            f"the {role} {draft} has another tokenizer than {target}: {len(right)} tokens and "
            f"{len(left)}, of which the first to differ is {token!r}, number {number}; take a "
            f"{role} with the same tokenizer, most often one of the same family"
        )
