"""The bodies of `/v1/embeddings` and of llama.cpp's `/embedding`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import Field, model_validator

from onnxport.errors import RequestError
from onnxport.serving.chat import check_variables
from onnxport.serving.http.body import Body
from onnxport.serving.http.chat_messages import ChatMessage
from onnxport.serving.http.encodings import EmbedDtype, Encoding, EncodingFormat, Endianness
from onnxport.serving.http.fields import ANY, LABELS
from onnxport.serving.http.prompts import Prompts
from onnxport.serving.http.protocol import MOST_MESSAGES, MOST_TRUNCATED
from onnxport.serving.http.request_ids import GivenId
from onnxport.serving.params import RequestOptions
from onnxport.serving.pooling import CUT_SIDE, EUCLIDEAN, MOST_ORDER, Norm, PoolingParams
from onnxport.serving.truncation import Around, Side, check_truncation, cut

NEUTRAL_EMBEDDING: Final[Mapping[str, Any]] = {
    **LABELS,
    **{"mm_processor_kwargs": ({},), "media_io_kwargs": ANY, "padding": ("do_not_pad",)},
    "chat_template": (),
}
OF_MESSAGES: Final = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
NO_NORM, INT16 = -1, 0  # llama.cpp's numbers; others are orders of norms


class EmbeddingFields(Body):
    """What both share: which model, and how the request is treated."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL_EMBEDDING

    model: str | None = None
    request_id: GivenId | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None

    def options(
        self, tenant: str | None, timeout_s: float | None, adapter: str | None
    ) -> RequestOptions:
        """Return how the request is treated; see `RequestBody.options`."""
        return RequestOptions(
            priority=self.priority or 0,
            tenant=(self.user or "") if tenant is None else tenant,
            cache_salt=self.cache_salt,
            adapter=adapter,
            timeout_s=timeout_s if self.timeout_s is None else self.timeout_s,
        )


class CutRequest(EmbeddingFields):
    """Texts that may be cut."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MOST_TRUNCATED)] | None = None
    truncation_side: Side | None = None  # "right", unless told otherwise

    @model_validator(mode="after")
    def _check_cut(self) -> Self:
        check_truncation(self.truncate_prompt_tokens)
        return self

    def truncated(self, prompt: list[int], most_tokens: int, around: Around) -> list[int]:
        """Return a prompt without the beginning or the end of its text.

        Args:
            prompt: token ids.
            most_tokens: that there is room for, where `truncate_prompt_tokens` is -1.
            around: what stays of it in any case.

        Raises:
            CapacityError: nothing of the text would be left.
        """
        most = self.truncate_prompt_tokens
        if most is None:
            return prompt
        most = most_tokens if most == -1 else most
        return cut(prompt, most, around, self.truncation_side or CUT_SIDE)


class TextsRequest(CutRequest):
    """Texts or tokens as OpenAI has them, or vLLM's conversation."""

    input: Prompts | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)] | None = (
        None
    )
    add_special_tokens: bool | None = None  # true of a text, false of a conversation
    add_generation_prompt: bool | None = None  # false unless told otherwise
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    documents: ClassVar[None] = None  # see `chat_messages.Rendering`

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if (self.input is None) == (self.messages is None):
            raise RequestError(
                "send either input, a text, token ids, or a list of either, or messages, a "
                "conversation",
                "input",
            )
        if self.messages is None:
            alone = [name for name in OF_MESSAGES if getattr(self, name) is not None]
            if alone:
                raise RequestError(
                    f"{alone[0]} goes with messages; send these, or leave it out", alone[0]
                )
        check_variables(self.chat_template_kwargs)
        return self


class EmbeddingRequest(TextsRequest):
    """The body of `/v1/embeddings`."""

    encoding_format: EncodingFormat | None = None  # float unless told otherwise
    embed_dtype: EmbedDtype | None = None  # float32, likewise
    endianness: Endianness | None = None  # native, likewise
    dimensions: int | None = None
    normalize: bool | None = None  # as the model says, unless told otherwise
    use_activation: bool | None = None  # vLLM's newer name of it
    prompt_name: str | None = None  # of sentence-transformers, ahead of each text; "" for none

    @model_validator(mode="after")
    def _check(self) -> Self:
        if None not in (self.normalize, self.use_activation):
            raise RequestError(
                "normalize and use_activation are two names of one field; send one of them",
                "use_activation",
            )
        _check_prompt_name(self.prompt_name, self.input)
        assert self.encoding  # or it is refused
        return self

    @property
    def encoding(self) -> Encoding:
        """How vectors are written. Raises RequestError for fields that do not go together."""
        given = (self.encoding_format, self.embed_dtype, self.endianness)
        return Encoding(given[0] or "float", given[1] or "float32", given[2] or "native")

    def params(self) -> PoolingParams:
        """Return how texts are embedded. Raises RequestError for a value out of its range."""
        normalize = self.use_activation if self.normalize is None else self.normalize
        return PoolingParams(self.dimensions, normalize)


def _check_prompt_name(name: str | None, given: Prompts | None) -> None:
    if name is not None and not _are_texts(given):
        raise RequestError(
            "prompt_name goes with texts; send these, or leave it out", "prompt_name"
        )


def _are_texts(given: Prompts | None) -> bool:
    return isinstance(given, str) or (
        given is not None and all(isinstance(one, str) for one in given)
    )


class LlamaEmbeddingRequest(CutRequest):
    """The body of `/embedding`, one text or several as llama.cpp calls them."""

    content: Prompts | None = None
    input: Prompts | None = None  # which it takes, too
    embd_normalize: int | None = None  # 2, by their Euclidean length, unless told otherwise
    prompt_name: str | None = None  # see `EmbeddingRequest`

    @model_validator(mode="after")
    def _check(self) -> LlamaEmbeddingRequest:
        if (self.content is None) == (self.input is None):
            raise RequestError(
                "send content, a text, token ids, or a list of either; or the same as input",
                "content",
            )
        _check_prompt_name(self.prompt_name, self.input if self.content is None else self.content)
        kind = self.embd_normalize
        if kind is not None and not NO_NORM <= kind <= MOST_ORDER:
            raise RequestError(
                f"embd_normalize is {kind}; send -1, for vectors as they are, 0, for numbers up to "
                "32760, 2, for vectors of Euclid's length 1, or another whole number up to "
                f"{MOST_ORDER}, for the norm of this order",
                "embd_normalize",
            )
        return self

    def params(self) -> PoolingParams:
        """Return how texts are embedded."""
        kind = EUCLIDEAN if self.embd_normalize is None else self.embd_normalize
        norm: Norm = "int16" if kind == INT16 else EUCLIDEAN if kind == NO_NORM else kind
        return PoolingParams(normalize=kind != NO_NORM, norm=norm)
