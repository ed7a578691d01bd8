"""`onnxport perplexity`: how well does a model foretell a text, and what did quantizing it cost?"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from onnxport.cli.arguments import (
    Commands,
    add_export_options,
    add_load_options,
    command,
    load_options,
    trials_folder,
)
from onnxport.cli.cache import add_source, find_artifact
from onnxport.cli.values import positive, text_of
from onnxport.errors import ArtifactError, OptionError, RequestError

if TYPE_CHECKING:
    from onnxport.providers.base import LoadOptions, Model
    from onnxport.serving.evaluation.perplexity import Divergence, Estimate, Perplexity

WINDOW: Final = 512  # tokens


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        "perplexity",
        "Measure how well a model foretells a text, and how far it is from another one.",
        run,
    )
    add_source(parser)
    parser.add_argument("text", metavar="FILE", type=Path, help="the text, in UTF-8")
    parser.add_argument("--json", action="store_true", help="print JSON")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--window",
        type=positive,
        default=WINDOW,
        metavar="N",
        help="cut the text into windows of N tokens, of each of which the second half counts "
        "(%(default)s)",
    )
    group.add_argument(
        "--most-windows", type=positive, metavar="N", help="no more than N windows (all of them)"
    )
    group.add_argument(
        "--against",
        type=Path,
        metavar="ARTIFACT",
        help="the same model as it was before, such as in fp32: tell how far the probabilities of "
        "the two are apart; both are loaded, on the same provider",
    )
    group.add_argument(
        "--base-kv-cache-dtype",
        metavar="TYPE",
        help="of the KV cache of --against: with fp32, and the model itself, it is seen what "
        "--kv-cache-dtype costs (the same as that)",
    )
    add_load_options(parser)
    parser.add_argument_group("choice of the provider").add_argument(
        "--no-trial",
        action="store_true",
        help="let `--provider auto` choose without measuring",
    )
    add_export_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, and print what was found."""
    from onnxport.graphs.artifact import Artifact
    from onnxport.serving.evaluation import perplexity

    artifact = find_artifact(options)
    if options.against is not None:
        _check_base(artifact, options.against)
    elif options.base_kv_cache_dtype is not None:
        raise OptionError("--base-kv-cache-dtype is that of --against, which is not given")
    text = text_of("FILE", options.text)
    vocab_size = Artifact.read(artifact, check_graphs=False).manifest.model.vocab_size
    token_ids, beginning = _tokens(artifact, text)
    windows = perplexity.windows_of(token_ids, options.window, beginning, vocab_size)
    windows = windows[: options.most_windows]
    with _opened(artifact, options) as model:
        found: dict[str, Any] = {
            "model": artifact.name,
            "provider": model.capabilities.provider,
            "compute_dtype": str(model.capabilities.compute_dtype),
            "kv_cache_dtype": str(model.capabilities.kv_cache_dtype),
            "text_tokens": len(token_ids),
            "window": options.window,
            "windows": len(windows),
        }
        started = time.perf_counter()
        if options.against is None:
            own, base, divergence = perplexity.measure(model, windows, _progress), None, None
        else:
            with _opened(options.against, options, options.base_kv_cache_dtype) as other:
                own, base, divergence = perplexity.compare(model, other, windows, _progress)
        found["seconds"] = time.perf_counter() - started
    found |= asdict(own)
    if base is not None and divergence is not None:
        found["against"] = {"model": options.against.name, **asdict(base), **asdict(divergence)}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found, own, base, divergence)))
    return 0


def _check_base(artifact: Path, base: Path) -> None:
    """Refuse a base model that is none, or whose tokens mean something else."""
    from onnxport.cli.cache import is_artifact
    from onnxport.serving.speculation.build import check_same_tokens

    if not is_artifact(str(base)):
        raise ArtifactError(
            f"--against names {base}, which is no artifact; give a folder that `onnxport export` "
            "wrote"
        )
    check_same_tokens(artifact, base, role="other model")


def _tokens(artifact: Path, text: str) -> tuple[list[int], int | None]:
    """The tokens of a text, and the one that the tokenizer puts ahead of it, if it does.

    Raises:
        RequestError: the text is empty.
    """
    from onnxport.serving.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(artifact, frozenset())
    [plain], [whole] = (
        tokenizer.encode_all([text], add_special_tokens=special) for special in (False, True)
    )
    if not plain:
        raise RequestError("the text is empty")
    ahead = whole[: len(plain)] != plain  # a text may begin with such a token itself
    return (whole[: len(plain) + 1], whole[0]) if ahead else (plain, None)


@contextmanager
def _opened(
    artifact: Path, options: argparse.Namespace, kv_cache_dtype: str | None = None
) -> Iterator[Model]:
    """A model with room for one window; its cache has that type, or that of the options."""
    from onnxport.graphs.artifact import refuse_head
    from onnxport.kv.states import SLOTS_PER_SEQUENCE
    from onnxport.providers.registry import open_model, read_artifact

    chosen = _room(load_options(options), options.window)
    if kv_cache_dtype is not None:
        chosen = replace(chosen, kv_cache_dtype=kv_cache_dtype)
    read = read_artifact(artifact, chosen)
    refuse_head(read)
    if read.manifest.model.linear is not None:
        chosen = replace(chosen, state_slots=SLOTS_PER_SEQUENCE)
    model = open_model(read, options.provider, chosen, trials_folder(options))
    try:
        yield model
    finally:
        model.close()


def _room(options: LoadOptions, window: int) -> LoadOptions:
    if options.kv_cache_tokens is None and options.kv_memory is None:
        options = replace(options, kv_cache_tokens=4 * window)  # layers may be in several groups
    return replace(options, max_model_len=options.max_model_len or window)


def _progress(number: int) -> None:
    """Say on a terminal how far it is."""
    if sys.stderr.isatty():
        print(f"\r{number} windows", end="", file=sys.stderr, flush=True)


def _lines(
    found: dict[str, Any], own: Perplexity, base: Perplexity | None, divergence: Divergence | None
) -> Iterator[str]:
    if sys.stderr.isatty():
        print(file=sys.stderr)
    yield (
        f"{found['model']} on {found['provider']}, computed in {found['compute_dtype']}, KV cache "
        f"{found['kv_cache_dtype']}"
    )
    yield (
        f"perplexity {_shown(own.perplexity)} (a token's mean log probability "
        f"{own.mean_logprob:.4f})"
    )
    yield (
        f"of {own.num_tokens} tokens, the second halves of {found['windows']} windows of "
        f"{found['window']}; the text has {found['text_tokens']}; {found['seconds']:.1f} s"
    )
    if base is None or divergence is None:
        return
    yield f"against {found['against']['model']}: perplexity {_shown(base.perplexity)} there"
    yield (
        f"KL divergence {_shown(divergence.kl)} nats; median {divergence.kl_median:.4g}, 99 % "
        f"below {divergence.kl_99:.4g}, largest {divergence.kl_most:.4g}"
    )
    yield f"the same token likeliest at {divergence.same_top:.2%} of the places"


def _shown(estimate: Estimate) -> str:
    return f"{estimate.mean:.4f} ± {estimate.error:.4f}"
