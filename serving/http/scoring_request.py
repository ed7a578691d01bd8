"""The bodies of `/classify`, `/pooling`, `/score` and `/rerank`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from onnxport.errors import RequestError
from onnxport.serving.chat import check_variables
from onnxport.serving.http.embedding_request import (
    NEUTRAL_EMBEDDING,
    EmbeddingFields,
    EmbeddingRequest,
    TextsRequest,
)
from onnxport.serving.http.fields import is_list
from onnxport.serving.http.prompts import text_of
from onnxport.serving.http.protocol import MOST_TRUNCATED
from onnxport.serving.pairs import INSTRUCTION
from onnxport.serving.scoring import OF_DOCUMENTS, OF_QUERIES, PairParams
from onnxport.serving.truncation import check_truncation

LINES: Final = "\n"  # what vLLM has between several texts of one content
_joined = partial(text_of, between=LINES)
Tokens = Annotated[int, Field(ge=0, le=MOST_TRUNCATED)]  # 0 is any number


def _query(value: Any) -> Any:
    """Return a text, or that of an object of vLLM's."""
    value = _joined(value)
    if isinstance(value, str):
        return value
    raise PydanticCustomError("union", "should be {what}", {"what": "a text"})


def _texts(value: Any) -> Any:
    """Return a text, or several, of which each may be an object of vLLM's that has one."""
    value = [_joined(one) for one in value] if isinstance(value, list) else _joined(value)
    if isinstance(value, str) or is_list(value, str):
        return value
    what = "a text, or a list of texts"
    raise PydanticCustomError("union", "should be {what}", {"what": what})


def _documents(value: Any) -> Any:
    """Return texts, of which each may be an object that has one, as Jina and Cohere have it.

    One alone may stand for a list of it, as vLLM has it.
    """
    found = [_text_of(one) for one in (value if isinstance(value, list) else [value])]
    if None in found:
        what = 'a list of texts, or of objects such as {"text": "…"}'
        raise PydanticCustomError("union", "should be {what}", {"what": what})
    return found


def _text_of(value: Any) -> str | None:
    if isinstance(value, dict) and value.keys() == {"text"}:
        value = value["text"]
    value = _joined(value)
    return value if isinstance(value, str) else None


Task = Literal["embed", "classify", "token_embed", "token_classify"]
Query = Annotated[str, PlainValidator(_query)]
Texts = Annotated[str | list[str], PlainValidator(_texts)]
Documents = Annotated[list[str], PlainValidator(_documents)]
FIRST: Final = ("text_1", "queries", "data_1")  # vLLM's names, the first one the oldest
SECOND: Final = ("text_2", "documents", "data_2", "items")


class ClassifyRequest(TextsRequest):
    """The body of `/classify`, as vLLM has it."""

    use_activation: bool | None = None  # whether to tell probabilities; true unless told otherwise
    activation: bool | None = None  # vLLM's older name of it

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_activation(self.use_activation, self.activation)
        return self

    @property
    def activated(self) -> bool:
        """Whether probabilities are told, and not what the score head gives."""
        return self.use_activation is not False and self.activation is not False


class PoolingRequest(EmbeddingRequest):
    """The body of `/pooling`, as vLLM has it: vectors, or numbers of labels."""

    task: Task | None = None  # what the model does of a whole text, unless told otherwise


class PairsFields(EmbeddingFields):
    """What requests share that compare texts."""

    neutral: ClassVar[Mapping[str, Any]] = {**NEUTRAL_EMBEDDING, "truncation_side": ("right",)}

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MOST_TRUNCATED)] | None = None
    instruction: str | None = None  # for a score template; as that has it, unless told otherwise
    use_activation: bool | None = None  # whether to tell probabilities; true unless told otherwise
    activation: bool | None = None  # vLLM's older name of it
    max_tokens_per_doc: Tokens | None = None  # of each document, whose end is left out
    max_tokens_per_query: Tokens | None = None  # of each query, likewise
    chat_template_kwargs: dict[str, Any] | None = None  # variables of a score template

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        check_variables(self.chat_template_kwargs)
        check_truncation(self.truncate_prompt_tokens)
        _check_activation(self.use_activation, self.activation)
        return self

    @property
    def activated(self) -> bool:
        """Whether scores are probabilities, and not what the score head gives."""
        return self.use_activation is not False and self.activation is not False

    def params(self, max_model_len: int) -> PairParams:
        """Return how pairs are scored, by a model that reads so many tokens at most."""
        most = self.truncate_prompt_tokens
        most_tokens = max_model_len if most == -1 else most
        variables = dict(self.chat_template_kwargs or {})
        instruction = variables.pop(INSTRUCTION, None)  # which goes before the field, as in vLLM
        if instruction is not None and not isinstance(instruction, str):
            raise RequestError(
                "chat_template_kwargs has an instruction that is no text; send a text",
                "chat_template_kwargs",
            )
        return PairParams(
            self.instruction if instruction is None else instruction,
            self.activated,
            most_tokens,
            self.max_tokens_per_doc or None,
            most_of_query=self.max_tokens_per_query or None,
            variables=variables,
        )


class ScoreRequest(PairsFields):
    """The body of `/score`, as vLLM has it: one text and one or more, or as many of both."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    items: Texts | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        first, second = self._sides()
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; send one and any number, "
                "or as many of both",
                "text_1",
            )
        return self

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs that are to be scored."""
        first, second = self._sides()
        return list(zip(first * (len(second) if len(first) == 1 else 1), second, strict=True))

    def _sides(self) -> tuple[list[str], list[str]]:
        return self._side(FIRST), self._side(SECOND)

    def _side(self, names: tuple[str, ...]) -> list[str]:
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"{' and '.join(given) or 'nothing'} was sent; send one of {', '.join(names)}, a "
                "text or a list of texts",
                given[1] if given else names[0],
            )
        texts: str | list[str] = getattr(self, given[0])
        listed = [texts] if isinstance(texts, str) else texts
        if not listed:
            raise RequestError(f"{given[0]} is empty; send a text, or several", given[0])
        return listed


class RerankRequest(PairsFields):
    """The body of `/rerank`: that of Jina, Cohere, vLLM and llama.cpp, or that of TEI."""

    query: Query
    documents: Documents | None = None
    top_n: Annotated[int, Field(ge=0)] | None = None  # all, unless told otherwise; vLLM has 0
    return_documents: bool | None = None  # true, but for llama.cpp's paths
    texts: list[str] | None = None  # TEI's name of documents, and what goes with it
    return_text: bool | None = None  # false unless told otherwise
    raw_scores: bool | None = None  # likewise
    truncate: bool | None = None  # likewise

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.documents is None) == (self.texts is None):
            raise RequestError("send documents, a list of texts; or the same as texts", "documents")
        of_other = (
            ("return_documents", "max_tokens_per_doc", "use_activation", "activation")
            if self.is_tei
            else ("return_text", "raw_scores", "truncate")
        )
        name = "texts" if self.is_tei else "documents"
        for other in of_other:
            if getattr(self, other) is not None:
                raise RequestError(f"{other} does not go with {name}; leave it out", other)
        if self.truncate and self.truncate_prompt_tokens is not None:
            raise RequestError(
                "truncate and truncate_prompt_tokens say the same; send one of them", "truncate"
            )
        if not self.listed:
            raise RequestError(f"{name} is empty; send a text, or several", name)
        return self

    @property
    def is_tei(self) -> bool:
        """Whether it is of the form of Hugging Face's Text Embeddings Inference."""
        return self.texts is not None

    @property
    def field(self) -> str:
        """The field that documents are in."""
        return "texts" if self.is_tei else "documents"

    @property
    def listed(self) -> list[str]:
        """The documents."""
        return (self.documents if self.texts is None else self.texts) or []

    @property
    def activated(self) -> bool:
        """Whether scores are probabilities, and not what the score head gives."""
        return super().activated and not self.raw_scores

    def params(self, max_model_len: int) -> PairParams:
        """Return how pairs are scored, by a model that reads so many tokens at most."""
        found = super().params(max_model_len)
        return replace(
            found,
            most_tokens=max_model_len if self.truncate else found.most_tokens,
            sides=(OF_QUERIES, OF_DOCUMENTS),
        )


def _check_activation(use_activation: bool | None, activation: bool | None) -> None:
    if None not in (use_activation, activation):
        raise RequestError(
            "use_activation and activation are two names of one field; send one of them",
            "activation",
        )
