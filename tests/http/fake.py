"""An engine that answers what a test says, token by token, and an application over it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import httpx

from onnxport.errors import AdapterError, UnknownAdapterError
from onnxport.providers.base import Capabilities
from onnxport.providers.null import NullModel
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.classifying import Classifier
from onnxport.serving.events import Listener
from onnxport.serving.fallback import Loss
from onnxport.serving.http.app import AppOptions, create_app
from onnxport.serving.outputs import CompletionDelta, Failure, FinishReason, Logprob
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import Embedder, PoolingParams
from onnxport.serving.stats import EngineStats
from onnxport.serving.structured.compiler import CompiledGrammar
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.tokenizer import Tokenizer

MODEL = "fake"
GRAMMAR = cast("CompiledGrammar", object())
STATS = EngineStats(0, 0, 8, 8, 0, 0, 0, 0, 0, finished=MappingProxyType({"stop": 0}))


@dataclass(frozen=True)
class Asked:
    """One request, as the engine got it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    request_id: str
    options: RequestOptions


@dataclass
class FakeEngine:
    """Says `answers[completion index]`, one character of each a step, the same for every prompt.

    Attributes:
        ends, stop_reason, fails: of the last delta.
        refusals: raised at the call, in turn; None lets the request pass.
        cached: prompt tokens that are told to be cached, by number of the request.
    """

    tokenizer: Tokenizer
    answers: Sequence[str] = ("ok",)
    ends: FinishReason = "stop"
    stop_reason: int | str | None = None
    fails: Failure | None = None
    refusals: list[Exception | None] = field(default_factory=list)
    cached: Sequence[int] = ()
    asked: list[Asked] = field(default_factory=list)
    streams: list[AsyncGenerator[CompletionDelta, None]] = field(default_factory=list)
    listeners: list[Listener] = field(default_factory=list)
    capabilities: Capabilities = field(default_factory=lambda: NullModel().capabilities)
    healthy: bool = True
    failure: str | None = None
    losses: Sequence[Loss] = ()
    adapters: list[Adapter] = field(default_factory=list)
    adapter_scales: Mapping[str, float] = field(default_factory=dict)
    compiled: list[StructuredOutputs] = field(default_factory=list)
    max_logprobs: int | None = 20
    max_num_seqs: int = 4
    num_unfinished: int = 0
    embedder: Embedder | None = None
    classifier: Classifier | None = None

    @property
    def most_prompts(self) -> int:
        return 8

    @property
    def prefix_caching(self) -> bool:
        return True

    def stats(self) -> EngineStats:
        return STATS

    async def load_adapter(self, name: str, path: Path, *, in_place: bool = False) -> Adapter:
        if any(each.name == name for each in self.adapters) and not in_place:
            raise AdapterError(f"{name} is loaded already")
        self.adapters.append(Adapter(name, len(self.adapters) + 1, "", 4, path, None))
        return self.adapters[-1]

    async def unload_adapter(self, name: str) -> None:
        found = [each for each in self.adapters if each.name == name]
        if not found:
            raise UnknownAdapterError(f"no adapter {name}")
        self.adapters.remove(found[0])

    async def end_thoughts(self, request_id: str) -> bool:
        raise AssertionError("nobody thinks here")

    async def set_adapter_scales(self, scales: Mapping[str, float]) -> None:
        self.adapter_scales = dict(scales)

    def add_listener(self, listener: Listener) -> None:
        self.listeners.append(listener)

    def embed(
        self,
        prompt: str | Sequence[int],
        params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        raise AssertionError("nothing is embedded here")

    def classify(
        self,
        prompt: str | Sequence[int],
        request_id: str | None = None,
        options: RequestOptions | None = None,
        *,
        activated: bool = True,
    ) -> AsyncGenerator[CompletionDelta, None]:
        raise AssertionError("nothing is classified here")

    async def compile(self, form: StructuredOutputs) -> CompiledGrammar:
        self.compiled.append(form)
        return GRAMMAR

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> AsyncGenerator[CompletionDelta, None]:
        assert grammar is (GRAMMAR if params.structured_outputs else None)  # nobody compiles again
        assert not isinstance(prompt, str)
        assert request_id is not None
        assert options is not None
        if self.refusals and (refusal := self.refusals.pop(0)):
            raise refusal
        self.asked.append(Asked(tuple(prompt), params, request_id, options))
        self.streams.append(self._stream(len(self.asked) - 1, request_id, params))
        return self.streams[-1]

    async def _stream(
        self, number: int, request_id: str, params: SamplingParams
    ) -> AsyncGenerator[CompletionDelta, None]:
        cached = self.cached[number] if self.cached else 0
        for step in range(max(map(len, self.answers)) + 1):
            for index, answer in enumerate(self.answers[: params.num_sequences]):
                if step > len(answer):
                    continue
                text = answer[step : step + 1]
                reason = None if text else self.ends
                entry = {ord(text): Logprob(-0.5 - index, 1, text)} if text else {}
                yield CompletionDelta(
                    request_id,
                    index,
                    text,
                    tuple(entry),
                    (entry,) if entry and params.num_logprobs is not None else None,
                    reason,
                    self.stop_reason if reason else None,
                    num_cached_tokens=cached,
                    failure=self.fails if reason else None,
                )


class Client:
    """Asks an application without a socket."""

    def __init__(
        self,
        engine: FakeEngine,
        folder: Path,
        options: AppOptions | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self.engine = engine
        template = ChatTemplate.read(folder) if template is None else template
        app = create_app(engine, MODEL, template, options)
        transport = httpx.ASGITransport(app)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self._http.get(path, headers=headers)

    async def complete(self, prompt: Any = "ab", key: str = "", **fields: Any) -> httpx.Response:
        return await self._post("completions", {"prompt": prompt, **fields}, key)

    async def chat(self, content: str = "ab", key: str = "", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self._post("chat/completions", {"messages": messages, **fields}, key)

    async def post(self, path: str, key: str = "", **fields: Any) -> httpx.Response:
        headers = {b"Content-Type": b"application/json"}
        if key:
            headers[b"Authorization"] = f"Bearer {key}".encode()
        response = await self._http.post(path, content=json.dumps(fields), headers=headers)
        assert all(stream.ag_frame is None for stream in self.engine.streams), "left open"
        return response

    async def _post(self, path: str, body: dict[str, Any], key: str) -> httpx.Response:
        return await self.post(f"/v1/{path}", key, **{"model": MODEL, **body})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream that ended in order."""
    *chunks, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
