"""The format of tool calls of the model that is served, with what its tokenizer makes of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from onnxport.serving.chat import TEMPLATE_FILE, ChatTemplate
from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import Functions, ToolFormat
from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.http.tool_formats.registry import AUTO, named, recognized
from onnxport.serving.structured.spec import StructuredOutputs

logger = logging.getLogger(__name__)


class Tokens(Protocol):
    """What is asked of a tokenizer."""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text."""
        ...


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How the model writes calls, in text and in tokens.

    Attributes:
        format: the syntax.
        special: those of its texts that are special tokens, and their ids.
    """

    format: ToolFormat = HERMES
    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, template: ChatTemplate, tokenizer: Tokens | None) -> ToolSyntax:
        """Return the syntax of a model; what was chosen is logged.

        Args:
            name: of the format; AUTO: the one that the chat template asks for.
            template: of the model.
            tokenizer: of the model.

        Raises:
            RequestError: there is no format of this name.
        """
        chosen = _chosen(name, template)
        ids = {} if tokenizer is None else {t: tokenizer.token_to_id(t) for t in chosen.tokens}
        special = {
            text: found
            for text, found in ids.items()
            if tokenizer is not None and found is not None and tokenizer.is_special(found)
        }
        return cls(chosen, special)

    @property
    def spelled(self) -> tuple[int, ...]:
        """The special tokens that have to be in a text for its calls to be found."""
        return tuple(sorted(self.special.values()))

    def parser(
        self, functions: Functions, *, skip_special_tokens: bool, is_formed: bool
    ) -> ToolCallParser:
        """Return what finds calls in a text.

        Args:
            functions: that were offered.
            skip_special_tokens: whether content has none.
            is_formed: whether a grammar gives the text its form.
        """
        hidden = self.hidden(functions, skip_special_tokens=skip_special_tokens)
        exact = self.format.exact
        syntax = replace(self.format, read=exact) if is_formed and exact else self.format
        return ToolCallParser(functions, syntax, hidden)

    def hidden(self, functions: Functions, *, skip_special_tokens: bool) -> tuple[str, ...]:
        """Return special tokens that are in a text for its calls alone; see `parser`."""
        return tuple(self.special) if functions and skip_special_tokens else ()

    def form(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        several: bool,
        forced: bool,
        alone: bool = False,
        name: str | None,
    ) -> StructuredOutputs:
        """Return the form of a text that calls tools; see `forced.calls`."""
        return calls(
            tools,
            self.format,
            self.special,
            several=several,
            forced=forced,
            alone=alone,
            name=name,
        )


def _chosen(name: str, template: ChatTemplate) -> ToolFormat:
    """Return the format of a name, or the one that the template asks for."""
    source = template.source(with_tools=True)
    if name != AUTO:
        chosen = named(name, source)
        logger.info("tool calls are read as %s, as --tool-call-parser says", chosen.name)
    elif found := recognized(source):
        chosen = found
        logger.info("tool calls are read as %s, recognized from the chat template", chosen.name)
    else:
        chosen = HERMES
        logger.info(
            "tool calls are read as %s: the chat template asks for no format that is known here; "
            "--tool-call-parser names another one",
            chosen.name,
        )
    if template and not template.tells_tools():
        logger.info(
            "the chat template does not tell the model of tools, so it does not see those that "
            "requests offer; another template, as %s in the model's folder, may tell it",
            TEMPLATE_FILE,
        )
    return chosen
