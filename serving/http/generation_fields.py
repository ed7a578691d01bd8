"""The fields of every API that generates: how tokens are chosen, what ends them, who goes first."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticKnownError

from onnxport.serving.http.body import Body
from onnxport.serving.http.fields import are_ids
from onnxport.serving.http.strict import expect

MAX_STOP_STRINGS: Final = 64  # each is looked for in every piece of text
MOST_TOKEN_IDS: Final = 1 << 20  # of a list; no vocabulary has as many
MOST_BIASES: Final = 1 << 17
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


def _token_ids(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Check a list of token ids, be it as long as the vocabulary, at once."""
    if isinstance(value, list) and len(value) > MOST_TOKEN_IDS:
        told = {"max_length": MOST_TOKEN_IDS, "actual_length": len(value), "field_type": "List"}
        raise PydanticKnownError("too_long", told)
    return value if are_ids(value) else handler(value)


# An error for each of a million elements would be gigabytes, and the first is all that is told.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_token_ids)]


StopStrings = Annotated[
    str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None,
    expect(f"a text or a list of texts, at most {MAX_STOP_STRINGS}"),
]


class GenerationFields(Body):
    """What all of them share, by the same names: OpenAI's, vLLM's and llama.cpp's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None  # true unless told otherwise
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[str], Field(fail_fast=True)] | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    repeat_last_n: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MOST_BIASES)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    min_tokens: int | None = None
    repetition_detection: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout_s: float | None = None
    stream: bool | None = None
    stream_interval: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    def generation(self) -> dict[str, Any]:
        """Return what was given of these fields, for the body of a chat that means the same.

        Whether it streams is the API's own matter.
        """
        told = {name: getattr(self, name) for name in GenerationFields.model_fields}
        return {name: one for name, one in told.items() if one is not None and name != "stream"}
