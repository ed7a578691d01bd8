"""What a model brings for its requests, sampling and chat template, and what is laid over it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxport.cli.values import json_object, text_of
from onnxport.errors import RequestError

if TYPE_CHECKING:
    from onnxport.serving.chat import ChatTemplate
    from onnxport.serving.defaults import SamplingDefaults
    from onnxport.serving.repetition import RepetitionDetection

BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file with it; a prompt must not


def add_generation_config(parser: argparse._ActionsContainer) -> None:
    """Add where sampling defaults come from."""
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="sampling defaults: the model's own (auto) or OpenAI's (none)",
    )


def add_override(parser: argparse._ActionsContainer) -> None:
    """Add what is laid over these defaults."""
    parser.add_argument(
        "--override-generation-config",
        type=sampling_fields,
        metavar="JSON",
        help="sampling defaults that go before those of --generation-config, such as "
        """'{"temperature": 0.6, "top_k": 20}' (none)""",
    )


def add_repetition_option(parser: argparse._ActionsContainer, whose: str = "") -> None:
    """Add when answers are stuck.

    Args:
        parser: of the command.
        whose: answers they are, in words, if not all.
    """
    parser.add_argument(
        "--repetition-detection",
        type=repetition_detection,
        metavar="JSON",
        help=f"ends answers that repeat themselves{whose}, such as "
        """'{"max_pattern_size": 64, "min_count": 8}' (none)""",
    )


def add_template_options(parser: argparse._ActionsContainer, variables: str) -> None:
    """Add the chat template and its variables, which the option `variables` sets."""
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja file instead of the model's own chat template",
    )
    parser.add_argument(
        variables,
        type=template_variables,
        default={},
        metavar="JSON",
        dest="template_variables",
        help="""variables of the chat template, such as '{"enable_thinking": false}' (none)""",
    )


def sampling_fields(text: str) -> dict[str, Any]:
    """Parse sampling defaults by name."""
    from onnxport.serving.defaults import SamplingDefaults

    found = json_object(text)
    try:
        SamplingDefaults().overridden(found)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def repetition_detection(text: str) -> RepetitionDetection:
    """Parse when an answer is stuck."""
    from onnxport.serving.repetition import RepetitionDetection

    try:
        return RepetitionDetection.from_mapping(json_object(text))
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def template_variables(text: str) -> dict[str, Any]:
    """Parse variables of a chat template by name."""
    from onnxport.serving.chat import check_variables

    found = json_object(text)
    try:
        check_variables(found)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def sampling_defaults(artifact: Path, options: argparse.Namespace) -> SamplingDefaults:
    """Return how requests that do not say are sampled.

    Raises:
        ArtifactError: the model's own defaults cannot be used.
    """
    from onnxport.serving.defaults import SamplingDefaults

    override = getattr(options, "override_generation_config", None)
    found = SamplingDefaults.of(artifact, options.generation_config, override)
    return replace(found, repetition_detection=getattr(options, "repetition_detection", None))


def template_text(options: argparse.Namespace) -> str | None:
    """Return the chat template that was given; None: the model's own is to be used.

    Raises:
        RequestError: the file cannot be read, is empty, or is not valid.
    """
    if options.chat_template is None:
        return None
    from onnxport.serving.jinja import compile_template

    text = text_of("--chat-template", options.chat_template).removeprefix(BYTE_ORDER_MARK)
    if not text.strip():
        raise RequestError(
            f"--chat-template names {options.chat_template}, which is empty; give a file with a "
            "template, or leave it out for the model's own"
        )
    compile_template(text, str(options.chat_template))
    return text


def chat_template(artifact: Path, text: str | None, variables: Mapping[str, Any]) -> ChatTemplate:
    """Return how the messages of a chat become a prompt.

    Args:
        artifact: whose template it is.
        text: instead of its own, see `template_text`; None: its own.
        variables: of the template, where a request sets none of that name.

    Raises:
        ArtifactError: the model's own template cannot be read.
        RequestError: no template has such a variable.
    """
    from onnxport.serving.chat import DEFAULT, ChatTemplate

    own = ChatTemplate.read(artifact)
    sources = own.sources if text is None else {DEFAULT: text}
    template = ChatTemplate(sources, own.special_tokens, variables)
    if unknown := [name for name in variables if not name or not template.knows(name)]:
        found = "does not speak of it" if template else "is missing"
        raise RequestError(
            f"{', '.join(map(repr, unknown))} was given as a variable of the chat template, which "
            f"{found}; check the spelling, or leave it out"
        )
    return template
