"""From an artifact folder to an engine, and who takes over if its provider does not work."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

from onnxport.errors import CapacityError, OptionError, ProviderError
from onnxport.graphs.artifact import Artifact, refuse_head
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.failures import forget
from onnxport.providers.hidden_states import without_embeddings
from onnxport.providers.registry import AUTO, get_provider, open_model, read_artifact
from onnxport.serving.classifying import Classifier
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.fallback import Fallback, Loss, Standby
from onnxport.serving.linear_attention import check_options, slots_wanted
from onnxport.serving.mixed_layers import refuse_tiers
from onnxport.serving.pooling import Embedder
from onnxport.serving.tokenizer import TOKENIZER_FILE, Tokenizer

logger = logging.getLogger(__name__)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Put off the search for cycles.

    A model is made of many small objects, none of them garbage: looking through them again and
    again takes a twentieth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def open_engine(
    path: Path,
    provider: str = AUTO,
    options: LoadOptions | None = None,
    config: EngineConfig | None = None,
    *,
    needs_tokenizer: bool = True,
    fallback: Sequence[str] = (),
    trials: Path | None = None,
    texts: Collection[str] = (),
) -> Engine:
    """Load the artifact in `path` with its tokenizer; closing the engine closes the model.

    Args:
        path: the artifact folder.
        provider: one of the providers, or "auto".
        options: what the provider may be told; None leaves it all to the provider.
        config: the engine's limits; None for the defaults. A draft model is loaded too.
        needs_tokenizer: refuse an artifact without a tokenizer; otherwise its engine takes token
            ids only.
        fallback: the providers that may take over, in order, when `provider` cannot load, or when
            its device is lost while the engine runs. They choose block size, attention and types
            by themselves, and load no artifact that replaced the first one. Nobody takes over
            unasked.
        trials: folder of measured trials for "auto", see `open_model`.
        texts: special tokens that are text here, see `Tokenizer.from_folder`.

    Raises:
        ArtifactError: `path` is not a valid artifact, or has no tokenizer and needs one, or a draft
            model has another one.
        ProviderError: no provider that may can run it, or a fallback could never do so, or an
            option does not go with it.
        CapacityError: it does not fit the memory.
    """
    config = config or EngineConfig()
    chosen = options or LoadOptions()
    speculation = config.speculation
    if speculation is not None:
        from onnxport.serving.speculation.build import build_speculator, located, telling

        speculation = located(speculation, path)
        chosen = telling(speculation, chosen)
    artifact = read_artifact(path, chosen)
    refuse_head(artifact)
    if artifact.manifest.model.linear is not None:
        check_options(config)
        chosen = replace(chosen, state_slots=chosen.state_slots or slots_wanted(config))
    if not artifact.manifest.model.has_even_caches:
        refuse_tiers(config)
    embedder = choose_embedder(artifact, config)
    if embedder is not None:
        logger.info("texts are embedded: %s", embedder)
    classifier = choose_classifier(artifact, config)
    if classifier is not None:
        logger.info("texts are judged: %s", classifier)
    pools = embedder is not None or classifier is not None
    if pools:
        chosen = replace(chosen, final_states=True)
    eos_token_ids = frozenset(artifact.manifest.eos_token_ids)
    tokenizer = None
    if needs_tokenizer or (path / TOKENIZER_FILE).is_file():
        tokenizer = Tokenizer.from_folder(path, eos_token_ids, texts)
    names = (fallback,) if isinstance(fallback, str) else tuple(fallback)
    for name in names:
        _check_fallback(name, provider, artifact, pools=pools)

    first = Fallback(provider, lambda: open_model(artifact, provider, chosen, trials))
    standby = Standby(
        (first, *(_fallback(artifact, name, provider, chosen, pools=pools) for name in names))
    )

    speculator = None
    if speculation is not None:
        tokens = config.max_num_batched_tokens
        speculator = build_speculator(
            *(speculation, path, provider, tokens, trials, chosen),
            recomputes=artifact.manifest.model.linear is not None,
        )

    def start(model: Model, standby: Standby) -> Engine:
        return Engine(
            model,
            tokenizer,
            config,
            eos_token_ids,
            standby=standby,
            speculator=speculator,
            base=artifact.manifest.model,
            sampling_threads=chosen.threads,
            embedder=embedder,
            classifier=classifier,
        )

    try:
        return _start_first(standby, start, path)
    except BaseException:
        if speculator is not None:
            speculator.close()
        raise


def choose_embedder(artifact: Artifact, config: EngineConfig) -> Embedder | None:
    """Return how an artifact's model embeds; None: it is not asked to.

    Raises:
        OptionError: it does nothing else, and is not to; or vectors are to be cut to more numbers
            than they have.
    """
    spec = artifact.manifest.embedding
    wants, is_asked = config.embeddings, config.pooling or config.matryoshka_dimensions
    if wants is None:
        wants = spec is not None or is_asked is not None
    if wants:
        asked, size = config.matryoshka_dimensions, artifact.manifest.model.hidden_size
        if isinstance(asked, tuple) and max(asked) > size:
            raise OptionError(
                f"matryoshka_dimensions are {', '.join(map(str, asked))}, and vectors of "
                f"{artifact.path.name} have {size} numbers; give none above that"
            )
        return Embedder.of(spec, config.pooling, asked)
    if spec is not None and spec.only:
        raise OptionError(
            f"{artifact.path.name} embeds texts and generates none, for its checkpoint has no "
            "head; use onnxport embed (LLM.embed), or serve without --no-embeddings"
        )
    return None


def choose_classifier(artifact: Artifact, config: EngineConfig) -> Classifier | None:
    """Return how an artifact's model judges texts; None: it does not, or is not to.

    Raises:
        OptionError: it does nothing else, and is not to; or a template was given to a model that
            judges nothing.
        RequestError: the template cannot be read, or is not valid.
    """
    spec = artifact.manifest.classification
    if spec is None:
        if config.score_template is not None:
            raise OptionError(
                f"the score template {config.score_template} was given, and {artifact.path.name} "
                "has no score head; leave it out, or export the model with "
                "--classifier-from-token"
            )
        return None
    if config.embeddings is not False:
        return Classifier.of(artifact, config.score_template)
    if spec.only:
        raise OptionError(
            f"{artifact.path.name} judges texts and generates none, for it has a score head in "
            "place of another; use onnxport rerank (LLM.score, LLM.classify), or serve without "
            "--no-embeddings"
        )
    return None


def _start_first(standby: Standby, start: Callable[[Model, Standby], Engine], path: Path) -> Engine:
    """Start an engine on the first provider that loads; the others stand by."""
    errors: list[tuple[str, ProviderError | CapacityError]] = []
    for number, candidate in enumerate(standby.fallbacks, 1):
        rest = standby.fallbacks[number:]
        try:
            model = candidate.load()
            name = model.capabilities.provider
            losses = tuple(Loss(lost, None, str(error), name) for lost, error in errors)
            try:
                return start(model, Standby(rest, losses))
            except BaseException:
                model.close()
                raise
        except (ProviderError, CapacityError) as error:
            if len(standby.fallbacks) == 1:
                raise
            errors.append((candidate.provider, error))
            forget(error)  # what it had loaded is not to be in the next one's way
            then = (
                f"{rest[0].provider} is tried instead, as was allowed" if rest else "none is left"
            )
            logger.warning("%s cannot be used: %s; %s", candidate.provider, error, then)
    reasons = "; ".join(f"{name}: {error}" for name, error in errors)
    # More memory would help where any of them lacked it.
    full = any(isinstance(error, CapacityError) for _, error in errors)
    kind = CapacityError if full else ProviderError
    raise kind(f"no provider that was allowed can run {path}. {reasons}") from ExceptionGroup(
        "providers", [error for _, error in errors]
    )


def _check_fallback(name: str, provider: str, artifact: Artifact, *, pools: bool) -> None:
    """Refuse a fallback that could never take over, before it is needed.

    Args:
        name: of the fallback.
        provider: that it is to take over from.
        artifact: that it would load.
        pools: whether texts are embedded, or judged.
    """
    if name in (AUTO, provider):
        return
    probe = get_provider(name).probe()
    if not probe.available:
        raise ProviderError(f"{name} cannot be a fallback here: {probe.reason}")
    model, able = artifact.manifest.model, probe.features
    lacks = None
    if model.linear is not None and not (able and able.has_states):
        lacks = f"the model has layers that keep states, which {name} does not run"
    elif model.latent is not None and not (able and able.has_latents):
        lacks = f"the model has multi-head latent attention, which {name} does not compute"
    elif model.has_mixed_layers and not (able and able.has_mixed_layers):
        lacks = f"layers of the model differ in their heads or share K/V, which {name} does not do"
    if lacks is not None:
        raise ProviderError(
            f"{name} cannot be a fallback here: {lacks}; take another one, such as cpu"
        )
    if pools and not (able and able.tells_states):
        raise ProviderError(
            f"{name} cannot be a fallback here: texts are embedded or judged, and {name} does not "
            "tell the hidden states of which embeddings are made; take another one, such as cpu"
            f"{without_embeddings(artifact)}"
        )


def _fallback(
    first: Artifact, name: str, provider: str, options: LoadOptions, *, pools: bool = False
) -> Fallback:
    """Return a fallback with the options that suit it too.

    It reads the artifact again, for it may have been exported once more meanwhile, and refuses one
    that is not `first`: requests would go on with another model. `pools` says whether texts are
    embedded, or judged; what only guesses need it may do without.
    """
    suited = options
    if name != provider:  # these may suit the other one alone
        suited = replace(
            options,
            block_size=None,
            attention=None,
            dtype="auto",
            kv_cache_dtype="auto",
            matmul_accuracy_level=None,
            adapter_dtype="auto",
            allowed_on_host=(),
            capture_graphs=None,
        )
    names = [each.name for each in fields(options)]
    dropped = [each for each in names if getattr(options, each) != getattr(suited, each)]

    def load() -> Model:
        if dropped:
            logger.warning(
                "%s chooses %s by itself; what was given was meant for %s",
                name,
                ", ".join(dropped),
                provider,
            )
        artifact = _read_again(first, suited)
        try:
            model = open_model(artifact, name, suited)
        except ProviderError as error:
            untold = replace(suited, hidden_layers=(), final_states=suited.final_states and pools)
            if untold == suited:
                raise
            logger.warning("%s is tried without a draft head's guesses: %s", name, error)
            model = open_model(artifact, name, untold)
        try:
            _read_again(first, suited)  # it may have been replaced while it was loaded
        except BaseException:
            model.close()
            raise
        return model

    return Fallback(name, load)


def _read_again(first: Artifact, options: LoadOptions) -> Artifact:
    """Read the folder of `first` again; raises ProviderError where it holds another artifact."""
    found = read_artifact(first.path, options)
    ours, theirs = first.manifest, found.manifest
    if theirs.fingerprint != ours.fingerprint:
        what = "other weights or another graph"
    elif set(theirs.eos_token_ids) != set(ours.eos_token_ids):
        what = f"the end tokens {[*theirs.eos_token_ids]}, which were {[*ours.eos_token_ids]}"
    else:
        return found
    raise ProviderError(
        f"{first.path} was replaced since it was loaded: it has {what}, and what runs cannot go on "
        "with that. Start it again, and export to another folder while a model is served."
    )
