"""Pairs of a query and a document, as a model that compares them reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from onnxport.errors import CapacityError, RequestError
from onnxport.serving.chat import DEFAULT, ChatTemplate
from onnxport.serving.template_messages import Message

INSTRUCTION: Final = "instruction"  # the variable of templates, and the field of requests


class PairTokenizer(Protocol):
    """What pairs ask of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        ...

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the tokens of two texts, joined as the tokenizer does that."""
        ...

    def decode_prompt(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, without a part of a character at its end."""
        ...

    def check_length(self, text: str, most_tokens: int) -> None:
        """Refuse a text that so many tokens cannot hold."""
        ...


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """How a pair is written: a chat template for messages of the roles query and document."""

    template: ChatTemplate

    @classmethod
    def read(cls, path: Path, folder: Path) -> PairTemplate:
        """Read it from a file.

        Args:
            path: of the file, in Jinja.
            folder: of the artifact, whose special tokens it may name.

        Raises:
            RequestError: the file cannot be read, or does not write both texts.
        """
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise RequestError(
                f"the score template {path} cannot be read ({error}); give a file in Jinja"
            ) from error
        tokens = ChatTemplate.read(folder).special_tokens
        found = cls(ChatTemplate({DEFAULT: source}, tokens))
        probe = found.render("\u2460", "\u2461", None)
        if "\u2460" not in probe or "\u2461" not in probe:
            raise RequestError(
                f"the score template {path} does not write both texts; it is given messages of the "
                "roles query and document, and must write the content of each"
            )
        return found

    def render(
        self,
        query: str,
        document: str,
        instruction: str | None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt of a pair.

        Args:
            query: the one text.
            document: the other.
            instruction: what is asked for, which becomes the variable of this name where the
                template reads it, as vLLM's do, and else a message of the role system; None: what
                the template itself has.
            variables: further ones of the template.

        Raises:
            RequestError: the template refuses them.
        """
        messages: list[Message] = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        if instruction is not None:
            if self.template.knows(INSTRUCTION):
                variables = {**variables, INSTRUCTION: instruction}
            else:
                messages.insert(0, {"role": "system", "content": instruction})
        try:
            return self.template.render(messages, **variables)
        except RequestError as error:
            raise RequestError(f"the score template cannot write this pair: {error}") from error

    def check_instruction(self, variables: Mapping[str, Any]) -> None:
        """Raise RequestError where the template writes no instruction, whatever is asked for."""
        if "\u2462" not in self.render("\u2460", "\u2461", "\u2462", variables):
            raise RequestError(
                "an instruction was given, and this model's score template does not write it: it "
                "reads no variable instruction, and no message of the role system; leave it out, "
                "or give another template with --score-template",
                INSTRUCTION,
            )


def beginning(tokenizer: PairTokenizer, text: str, most_tokens: int) -> str:
    """Return a text without what is behind its first tokens."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= most_tokens:
        return text
    return tokenizer.decode_prompt(ids[:most_tokens], skip_special_tokens=False)


def fitted(
    tokenizer: PairTokenizer,
    text: str,
    write: Callable[[str], list[int]],
    most_tokens: int | None,
    most_of_text: int | None,
) -> list[int]:
    """Return the tokens of a prompt with a text in it, whose end is left out as far as need be.

    So what stands behind the text stays, as what the model is to answer, or the last token.

    Args:
        tokenizer: of the model.
        text: in the prompt.
        write: returns the tokens of the prompt with a text.
        most_tokens: of the prompt; None: there may be any number.
        most_of_text: tokens of the text, likewise.

    Raises:
        CapacityError: there is no room for any of the text.
    """
    if most_tokens is None and most_of_text is None:
        return write(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    kept = len(ids) if most_of_text is None else min(len(ids), most_of_text)
    while True:
        part = text
        if kept < len(ids):
            part = tokenizer.decode_prompt(ids[:kept], skip_special_tokens=False)
        found = write(part)
        over = 0 if most_tokens is None else len(found) - most_tokens
        if over <= 0:
            return found
        if kept == 0:
            raise CapacityError(
                f"a prompt has {len(found)} tokens without anything of the document, and is to "
                f"have {most_tokens} at most; shorten the query, or allow more"
            )
        kept = max(0, kept - over)  # each time fewer, whatever the texts' ends become together


@dataclass(frozen=True, slots=True)
class PairEncoder:
    """Turns pairs into tokens.

    Attributes:
        tokenizer: of the model.
        template: how pairs are written; None: the tokenizer joins the two texts.
        max_model_len: the longest that a pair may be.
        variables: of the template, besides those that are the pair's.
    """

    tokenizer: PairTokenizer
    template: PairTemplate | None
    max_model_len: int
    variables: Mapping[str, Any] = field(default_factory=dict)

    def encode(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        *,
        most_tokens: int | None = None,
        most_of_document: int | None = None,
    ) -> list[int]:
        """Return the tokens of a pair.

        Args:
            query: the one text.
            document: the other.
            instruction: see `PairTemplate.render`.
            most_tokens: of the pair; the end of the document is left out for that. None: none is.
            most_of_document: tokens of the document, likewise.

        Raises:
            RequestError: the template refuses the pair.
            CapacityError: there is no room for any of the document, or the pair is longer than the
                model takes.
        """
        if most_tokens is None and most_of_document is None:
            for text in (query, document):
                self.tokenizer.check_length(text, self.max_model_len)
        return fitted(
            self.tokenizer,
            document,
            lambda text: self._whole(query, text, instruction),
            most_tokens,
            most_of_document,
        )

    def check(self, instruction: str | None) -> None:
        """Raise RequestError where nothing writes an instruction, or reads variables."""
        if self.template is None:
            what, name = "an instruction was given", INSTRUCTION
            if instruction is None:
                what, name = "chat_template_kwargs were given", "chat_template_kwargs"
            if instruction is not None or self.variables:
                raise RequestError(
                    f"{what}, and this model has no score template that writes it; leave it out, "
                    "or give a template with --score-template",
                    name,
                )
        elif instruction is not None:
            self.template.check_instruction(self.variables)

    def _whole(self, query: str, document: str, instruction: str | None) -> list[int]:
        if self.template is None:
            return self.tokenizer.encode_pair(query, document)
        text = self.template.render(query, document, instruction, self.variables)
        return self.tokenizer.encode(text, add_special_tokens=False)
