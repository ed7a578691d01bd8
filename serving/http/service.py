"""What every endpoint is given: the engine, what it serves, and how that reads and writes text."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from onnxport.errors import AdapterError, CapacityError
from onnxport.providers.base import Capabilities
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.classifying import Classifier
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.events import Listener
from onnxport.serving.fallback import Loss
from onnxport.serving.http.adapter_folder import AdapterFolder
from onnxport.serving.http.errors import ApiError, shortened
from onnxport.serving.http.tool_formats.syntax import ToolSyntax
from onnxport.serving.infill import Infill
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import Embedder, PoolingParams
from onnxport.serving.reasoning import AnyFormat
from onnxport.serving.stats import EngineStats
from onnxport.serving.structured.compiler import CompiledGrammar
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.text import Pieces
from onnxport.version import __version__


class Tokenizer(Protocol):
    """What the server asks of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text."""
        ...

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the token ids of two texts, joined."""
        ...

    def check_length(self, text: str, most_tokens: int) -> None:
        """Refuse a text that so many tokens cannot hold."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        ...

    def decode_prompt(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a prompt, without a part of a character at its end."""
        ...

    def token_spelling(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, as log probabilities name it."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        ...

    def detokenizer(
        self,
        prompt: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spelled: Collection[int] = (),
    ) -> Pieces:
        """Return what gives the text of the tokens that follow `prompt`."""
        ...

    @property
    def eos_token_ids(self) -> Collection[int]:
        """The tokens that end a generation."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text."""
        ...

    @property
    def infill_tokens(self) -> Mapping[str, object]:
        """Tokens to fill in by that its files name."""
        ...

    def special_spellings(self) -> Sequence[str]:
        """Return the special tokens as texts spell them."""
        ...

    def without_special(self, spellings: Collection[str]) -> Self:
        """Return a tokenizer to which these, and special tokens, are text like any other."""
        ...


class Engine(Protocol):
    """What the server asks of the engine."""

    @property
    def capabilities(self) -> Capabilities:
        """What was loaded."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a model without."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether requests are accepted."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine can do nothing more; None while it can."""
        ...

    @property
    def losses(self) -> Sequence[Loss]:
        """The providers that were lost, or never loaded, the latest last."""
        ...

    @property
    def prefix_caching(self) -> bool:
        """Whether K/V that another request has computed are used again."""
        ...

    @property
    def most_prompts(self) -> int:
        """Most requests that one client can have waiting, when nobody else has any."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once."""
        ...

    @property
    def max_logprobs(self) -> int | None:
        """Most likeliest tokens that a position may tell; None: there is no limit."""
        ...

    @property
    def adapters(self) -> Sequence[Adapter]:
        """The LoRA adapters that requests may pick."""
        ...

    @property
    def has_all_adapters(self) -> bool:
        """Whether as many are loaded as may be."""
        ...

    async def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> Adapter:
        """Load an adapter from a folder of this machine."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Let no more requests find an adapter."""
        ...

    async def end_thoughts(self, request_id: str) -> bool:
        """Close what a request thinks; returns whether there may be a thought to close."""
        ...

    @property
    def adapter_scales(self) -> Mapping[str, float]:
        """What adapters are times in requests that pick none, by name; others 0."""
        ...

    async def set_adapter_scales(self, scales: Mapping[str, float]) -> None:
        """Say so, for new requests."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended, those among them that came while a step runs."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        ...

    async def compile(self, form: StructuredOutputs) -> CompiledGrammar:
        """Return the grammar of requests, so that `stream` need not wait for it."""
        ...

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Check a request now; yield the deltas of all its completions.

        Closing the generator aborts the request.
        """
        ...

    @property
    def embedder(self) -> Embedder | None:
        """How prompts are embedded; None: none are."""
        ...

    def embed(
        self,
        prompt: str | Sequence[int],
        params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Check a prompt that is to be embedded now; yield its one delta.

        Closing the generator aborts the request.
        """
        ...

    @property
    def classifier(self) -> Classifier | None:
        """How prompts are classified; None: none are."""
        ...

    def classify(
        self,
        prompt: str | Sequence[int],
        request_id: str | None = None,
        options: RequestOptions | None = None,
        *,
        activated: bool = True,
        per_token: bool = False,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Check a prompt that is to be classified now; yield its one delta.

        Closing the generator aborts the request.
        """
        ...

    def add_listener(self, listener: Listener) -> None:
        """Tell `listener` from now on what happens."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """What every endpoint needs."""

    engine: Engine
    model_name: str
    template: ChatTemplate
    defaults: SamplingDefaults
    request_timeout_s: float | None = None  # of requests that give none
    tools: ToolSyntax = field(default_factory=ToolSyntax)  # how the model calls tools
    reasoning: AnyFormat | None = None  # None: it is not told from the answer
    aliases: tuple[str, ...] = ()  # further names of the model
    ping_interval_s: float = 0.0  # of comments in streams that say nothing; 0: there are none
    thinking_token_budget: int | None = None  # of chats that give none
    stream_interval: int = 1  # of streams that give none
    infill: Infill | None = None  # how the model fills in; None: it has no tokens for that
    closes_thoughts: bool = False  # whether a thought can be closed while it is open
    # Chats whose thoughts may be closed, by the tenant of their key and the id of their answer.
    thinking: dict[tuple[str | None, str], str] = field(default_factory=dict)
    artifact: str = ""  # what its graph and weights hash to; "": that is not known
    adapter_folder: AdapterFolder | None = None  # of adapters that are loaded when they are named
    forces_usage: bool = False  # whether streams tell the usage that did not ask for it
    started_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a model that serves text."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None, "a server needs a model with a tokenizer"
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """What an answer is computed with, OpenAI's `system_fingerprint`."""
        parts = ("onnxport", __version__, self.engine.capabilities.provider, self.artifact[:8])
        return "-".join(part for part in parts if part)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model itself; the first is the one that answers tell."""
        return (self.model_name, *self.aliases)

    async def pick_adapter(self, model: str | None) -> str | None:
        """Return what `adapter_of` does, once an adapter of the folder is loaded, if it names one.

        Raises:
            ApiError: see `adapter_of`; a 400, the folder has one that cannot be served.
            OverloadedError: it has to wait for a place, and is asked for again.
        """
        if self.adapter_folder is not None and model and model not in self.model_names:
            try:
                await self.adapter_folder.load(self.engine, model)
            except (AdapterError, CapacityError) as error:
                raise ApiError(400, str(error), "model") from error
        return self.adapter_of(model)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request picks by its model; None for the model itself.

        A request that names no model means the model itself, as with vLLM.

        Raises:
            ApiError: a 404, neither has this name.
        """
        if not model or model in self.model_names:
            return None
        names = [adapter.name for adapter in self.engine.adapters]
        if model not in names:
            served = ", ".join(repr(name) for name in (*self.model_names, *names))
            raise ApiError(
                404,
                f"the model {shortened(model)!r} is not served here; this server has {served}",
                "model",
                "model_not_found",
            )
        return model
