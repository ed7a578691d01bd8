"""The application over a model: what `onnxport serve` listens with and `run-batch` asks itself."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from onnxport.cli.adapters import add_adapter_options, named_adapters
from onnxport.cli.arguments import (
    add_choice_options,
    add_export_options,
    add_load_options,
    add_reasoning_option,
)
from onnxport.cli.engine_arguments import (
    add_cache_options,
    add_embedding_options,
    add_engine_options,
    add_queue_options,
    add_score_template,
    add_speculation_options,
    engine_config,
)
from onnxport.cli.model_defaults import (
    add_generation_config,
    add_override,
    add_repetition_option,
    add_template_options,
    chat_template,
    sampling_defaults,
    template_text,
)
from onnxport.cli.session import load_engine
from onnxport.cli.values import json_object, seconds
from onnxport.errors import RequestError
from onnxport.serving.config import LogprobsMode

if TYPE_CHECKING:
    from fastapi import FastAPI

    from onnxport.serving.worker import AsyncEngine

logger = logging.getLogger(__name__)


def add_api_options(group: argparse._ArgumentGroup) -> None:
    """Add how requests are answered that do not say otherwise."""
    group.add_argument(
        "--served-model-name",
        type=model_name,
        nargs="+",
        metavar="NAME",
        help="what requests may call the model, put behind MODEL; of several names answers tell "
        "the first (the model's)",
    )
    group.add_argument(
        "--request-timeout",
        type=timeout,
        metavar="SECONDS",
        help="end requests that take longer, unless they say timeout_s themselves (none)",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="makes requests without a seed of their own reproducible, by their order (none)",
    )
    group.add_argument(
        "--max-logprobs",
        type=int,
        metavar="N",
        help="most of the likeliest tokens whose log probabilities a request may ask for at each "
        "position; -1: no limit, and requests that ask for -1 get all tokens (20)",
    )
    group.add_argument(
        "--logprobs-mode",
        choices=get_args(LogprobsMode),
        help="what log probabilities are of: of the model's own logits (raw_logprobs, default), or "
        "of what tokens are drawn from; or these logits themselves",
    )
    add_generation_config(group)
    add_override(group)
    add_repetition_option(group, ", of requests that do not say")
    add_template_options(group, "--default-chat-template-kwargs")
    add_reasoning_option(group)
    group.add_argument(
        "--thinking-token-budget",
        type=int,
        metavar="N",
        help="most tokens that chats, responses and messages think which do not say (no limit)",
    )
    group.add_argument(
        "--tool-call-parser",
        type=tool_call_parser,
        default="auto",
        metavar="FORMAT",
        help="how the model writes tool calls: apertus, cohere_command3, cohere_command4, "
        "cohere_command_r, deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, "
        "deepseek_v41, dots, functionary_v3_1, functionary_v3_2, functiongemma, gemma4, "
        "gigachat3, glm4, glm45, granite, granite-20b-fc, hermes, hunyuan_a13b, hy_v3, "
        "hy_v4, internlm, k2_horizon, kimi_k2, kimi_k3, lfm2, llama3_json, longcat, mimo, "
        "minicpm5, minimax, minimax_m2, minimax_m3, mistral, muse, nemotron_json, olmo3, "
        "openai, phi4_mini_json, plamo3, pythonic, qwen3_coder, seed_oss, solar_open, "
        "step3, xlam, or another name of vLLM's (auto: as its chat template says)",
    )
    group.add_argument(
        "--infill-tokens",
        type=infill_tokens,
        metavar="JSON",
        help="the tokens by which the model fills in a gap, as its vocabulary spells them: prefix, "
        "suffix and middle, perhaps pad, repo_name and file_separator (those that are known of its "
        "family, where its vocabulary has them)",
    )
    group.add_argument(
        "--spm-infill",
        action="store_true",
        help="fill in with what stands behind the gap first, for models that prefer that",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add how the model is exported and loaded, and what of it is served."""
    add_load_options(parser)
    add_choice_options(parser)
    add_engine_options(parser)
    add_embedding_options(parser)
    add_score_template(parser)
    add_queue_options(parser)
    add_cache_options(parser)
    add_speculation_options(parser)
    add_adapter_options(parser)
    add_export_options(parser)


def timeout(text: str) -> float:
    """Return seconds above 0, and as many at most as a request may say."""
    from onnxport.serving.param_ranges import MAX_TIMEOUT_S

    if (found := seconds(text)) > MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(
            f"{text} is more than {MAX_TIMEOUT_S:.0f} seconds; leave it out for no limit"
        )
    return found


def model_name(text: str) -> str:
    """Return a name that is one."""
    if not text:
        raise argparse.ArgumentTypeError("a model without a name cannot be asked for; give it one")
    return text


def tool_call_parser(text: str) -> str:
    """Return the name of a format of tool calls, or "auto"."""
    from onnxport.serving.http.tool_formats.registry import AUTO, KNOWN

    if text not in (AUTO, *KNOWN):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no format of tool calls; give {AUTO}, or one of {', '.join(KNOWN)}"
        )
    return text


def infill_tokens(text: str) -> dict[str, object]:
    """Return tokens of filling in by their names."""
    from onnxport.serving.infill import InfillNames

    found: dict[str, object] = json_object(text)
    try:
        InfillNames.of(found, suffix_first="middle" not in found)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def check_infill(options: argparse.Namespace) -> None:
    """Refuse tokens of filling in that lack the one behind the suffix, where that is last.

    Raises:
        RequestError: they do.
    """
    from onnxport.serving.infill import InfillNames

    if options.infill_tokens is not None:
        InfillNames.of(options.infill_tokens, suffix_first=options.spm_infill)


def model_names(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the names that requests may call the model by, the one that answers tell first.

    Raises:
        RequestError: one is given twice, or an adapter has it.
    """
    source: str = options.source
    path = Path(source)
    own = path.resolve().name if path.exists() else source
    names = tuple(options.served_model_name or (own,))
    if twice := [name for name in names if names.count(name) > 1]:
        raise RequestError(f"--served-model-name has {twice[0]!r} twice; give each name once")
    for adapter, _ in named_adapters(options):
        if adapter in names:
            raise RequestError(
                f"an adapter of --lora-modules or --lora-scaled is called {adapter!r}, as the "
                "model itself is called; choose another name, or another --served-model-name"
            )
    return names


class Chosen(NamedTuple):
    """What options say of the API, checked before a model is exported or loaded."""

    names: tuple[str, ...]  # that requests may call the model by
    template: str | None  # of chats; None: the model's own


def check_choices(options: argparse.Namespace) -> Chosen:
    """Return what was chosen.

    Raises:
        OnnxportError: something of it cannot be.
    """
    chosen = Chosen(model_names(options), template_text(options))
    engine_config(options)
    check_infill(options)
    return chosen


@contextmanager
def open_app(
    artifact: Path, chosen: Chosen, options: argparse.Namespace, **more: Any
) -> Iterator[tuple[FastAPI, AsyncEngine]]:
    """Give the application over an artifact, and its engine, which is closed at the end.

    Args:
        artifact: its folder.
        chosen: see `check_choices`.
        options: of the command.
        more: what `AppOptions` has that concerns servers alone.
    """
    import asyncio

    from onnxport.graphs.artifact import Artifact
    from onnxport.serving.http.app import AppOptions, create_app
    from onnxport.serving.reasoning_formats import reasoning_format
    from onnxport.serving.worker import AsyncEngine

    template = chat_template(artifact, chosen.template, options.template_variables)
    defaults = sampling_defaults(artifact, options)
    logger.info("requests that do not say are sampled with %s", defaults)
    found = reasoning_format(options.reasoning_parser, template.sources.values())
    logger.info(
        "reasoning parser %s: %s",
        options.reasoning_parser,
        "no reasoning is told from answers" if found is None else f"reasoning is {found}",
    )
    engine = AsyncEngine(load_engine(artifact, options, found.tags if found else ()))
    try:
        choices = AppOptions(
            defaults,
            request_timeout_s=options.request_timeout,
            reasoning_parser=options.reasoning_parser,
            tool_call_parser=options.tool_call_parser,
            aliases=chosen.names[1:],
            thinking_token_budget=options.thinking_token_budget,
            infill_tokens=options.infill_tokens,
            spm_infill=options.spm_infill,
            lora_folder=options.lora_folder,
            artifact=Artifact.read(artifact, check_graphs=False).manifest.fingerprint,
            **more,
        )
        yield create_app(engine, chosen.names[0], template, choices), engine
    finally:
        asyncio.run(engine.close())
