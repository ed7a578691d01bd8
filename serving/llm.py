"""Offline inference, in the shape of vLLM's `LLM`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack, cast

from onnxport.errors import RequestError
from onnxport.providers.base import Capabilities, LoadOptions
from onnxport.providers.features import Attention
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.adapters.registry import AdapterReader
from onnxport.serving.beam_params import BeamSearchOutput, BeamSearchParams
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.collect import Collector, OutputCollector
from onnxport.serving.config import EngineConfig, EngineOptions
from onnxport.serving.defaults import GenerationConfig, SamplingDefaults
from onnxport.serving.engine import Engine
from onnxport.serving.llm_pooling import PoolingMethods
from onnxport.serving.loading import open_engine
from onnxport.serving.outputs import RequestOutput
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.prompts import Prompt, one_for_each, text_or_ids, variables_of
from onnxport.serving.reasoning_formats import AUTO, reasoning_format
from onnxport.serving.request import Request
from onnxport.serving.running import run_to_ends
from onnxport.serving.stats import EngineStats
from onnxport.serving.template_messages import Message, Tool
from onnxport.serving.thought_budget import with_thought
from onnxport.serving.tokenizer import Tokenizer

DEFAULTS = EngineConfig()


class LLM(PoolingMethods):
    """A model and its engine, run in the caller's thread until every request has ended.

    Example:
        >>> with LLM("my-model") as llm:
        ...     outputs = llm.generate(["The sea is"], SamplingParams(temperature=0.0))
        ...     print(outputs[0].outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        provider: str = "auto",
        threads: int | None = None,
        max_num_seqs: int = DEFAULTS.max_num_seqs,
        max_num_batched_tokens: int = DEFAULTS.max_num_batched_tokens,
        kv_cache_tokens: int | None = None,
        max_model_len: int | None = None,
        kv_cache_dtype: str = "auto",
        block_size: int | None = None,
        attention: Attention | None = None,
        matmul_accuracy_level: int | None = None,
        seed: int | None = None,
        kv_memory: int | float | None = None,
        dtype: str = "auto",
        allowed_on_host: Sequence[str] = (),
        capture_graphs: bool | None = None,
        fallback: Sequence[str] = (),
        max_adapters: int = 0,
        max_adapter_rank: int = 16,
        adapter_dtype: str = "auto",
        graph_cache: str | Path | None = None,
        coarse_head: bool = True,
        hybrid_kv_cache: bool = True,
        generation_config: GenerationConfig = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        **limits: Unpack[EngineOptions],
    ) -> None:
        """Load an artifact.

        Args:
            model: the artifact folder; one without a tokenizer takes token ids only.
            provider: one of the providers, or "auto".
            threads: compute threads; None: the physical cores.
            max_num_seqs: most requests that run at once.
            max_num_batched_tokens: most tokens in one step.
            kv_cache_tokens: size of the KV cache in tokens; None: from free memory.
            max_model_len: longest sequence in tokens; None: the artifact's context.
            kv_cache_dtype: "auto" or a dtype that the provider knows.
            block_size: tokens of one KV block; None: the provider's choice.
            attention: force a lowering; None: the best there is.
            matmul_accuracy_level: of quantized products: 1 computes in fp32, 4 in int8; None: the
                provider's choice.
            seed: makes requests without a seed of their own reproducible.
            kv_memory: size of the KV cache instead of `kv_cache_tokens`: bytes (int), or a share of
                the memory that the weights leave free (float); None: 0.4.
            dtype: "auto", "float32", "float16" or "bfloat16": of activations.
            allowed_on_host: operator types that may run on the host where the device does not
                take them.
            capture_graphs: record decode steps and replay them, which only cuda can; None: where
                it can.
            fallback: the providers that may take over, in order, when this one cannot load or
                its device is lost; see `open_engine`.
            max_adapters: LoRA adapters that one step can use, see `load_adapter`; memory for all of
                them is set aside now. As many can be loaded, or `max_host_adapters`.
            max_adapter_rank: the largest rank of an adapter.
            adapter_dtype: what adapters are kept in: "auto", or "float32", "float16", "bfloat16",
                "int8" or "int4" where the provider can; docs/adapters.md tells what each costs.
            graph_cache: a folder of your own that keeps lowered graphs: the next start of the same
                artifact takes less time. None: none is kept.
            coarse_head: let the provider keep half a byte more for each of the output head's
                weights, where it then reads less for most sampling (cpu); tokens are the same
                but for a chance that docs/providers.md tells.
            hybrid_kv_cache: let layers with a sliding window have blocks of their own, so that
                those behind the window are used again (cpu, cuda, webgpu); no token depends on it.
            generation_config: how prompts without `SamplingParams` are sampled: "auto", as the
                model's `generation_config.json` says, or "none", by OpenAI's defaults; see
                `get_default_sampling_params`.
            override_generation_config: values laid over these, by the names of `SamplingDefaults`.
            limits: more limits of the engine, by the names of `EngineConfig`.

        Raises:
            OnnxportError: the artifact, the provider or the sizes do not fit, see `open_engine`, or
                the sampling defaults are not valid.
        """
        folder = Path(model)
        defaults = SamplingDefaults.of(folder, generation_config, override_generation_config)
        config = EngineConfig(max_num_seqs, max_num_batched_tokens, seed, **limits)
        options = LoadOptions(
            threads=threads,
            kv_cache_tokens=kv_cache_tokens,
            kv_memory=kv_memory,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            max_model_len=max_model_len,
            attention=attention,
            matmul_accuracy_level=matmul_accuracy_level,
            dtype=dtype,
            allowed_on_host=tuple(allowed_on_host),
            capture_graphs=capture_graphs,
            max_adapters=max_adapters,
            max_adapter_rank=max_adapter_rank,
            adapter_dtype=adapter_dtype,
            graph_cache=None if graph_cache is None else Path(graph_cache),
            coarse_head=coarse_head,
            hybrid_kv_cache=hybrid_kv_cache,
        )
        engine = open_engine(
            folder, provider, options, config, needs_tokenizer=False, fallback=fallback
        )
        self._take(engine, ChatTemplate.read(folder), defaults)

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        template: ChatTemplate | None = None,
        defaults: SamplingDefaults | None = None,
    ) -> LLM:
        """Wrap an engine that is there already; `close` closes it.

        Args:
            engine: runs the prompts.
            template: of `chat`; None: there is none.
            defaults: of prompts without `SamplingParams`; None: OpenAI's.
        """
        llm = cls.__new__(cls)
        llm._take(engine, template, defaults or SamplingDefaults())
        return llm

    @property
    def capabilities(self) -> Capabilities:
        """What was really loaded."""
        return self._engine.capabilities

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer."""
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what prompts without `SamplingParams` get: what the model's authors chose.

        These are temperature, top_p, top_k, min_p, repetition_penalty and typical_p, see
        `SamplingDefaults`; the others are as `SamplingParams` has them, so up to 16 tokens are
        generated.
        `SamplingParams` that are given count as they are: nothing of the model's is put into them.
        """
        return self._params

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._engine.stats()

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that are loaded."""
        return self._engine.adapters.loaded

    def load_adapter(
        self,
        name: str,
        path: str | Path,
        *,
        in_place: bool = False,
        reader: AdapterReader | None = None,
    ) -> Adapter:
        """Load a LoRA adapter, which `RequestOptions(adapter=name)` picks from then on.

        Args:
            name: what requests call it.
            path: a folder as PEFT's `save_pretrained` writes it, or what `reader` reads.
            in_place: replace the one of that name.
            reader: `onnxport.cli.adapter_files.read_adapter` reads llama.cpp's files, too; None:
                PEFT's folders alone.

        Raises:
            AdapterError: it cannot be read, does not fit the model, or its name is taken.
            CapacityError: as many are loaded as may be, its rank is too large, or memory is short.
            ProviderError: the device fails.
        """
        adapters = self._engine.adapters
        return adapters.load(name, adapters.read(Path(path), reader), in_place=in_place)

    def unload_adapter(self, name: str) -> None:
        """Let no more requests pick an adapter, and free its slot.

        Raises:
            UnknownAdapterError: none of that name is loaded.
        """
        self._engine.adapters.unload(name)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs are in the order of the prompts.

        All requests are checked before any is run. One that fails while it runs has the finish
        reason "error", and says why, in its output; the others go on.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": ids}`, or a list of these.
            sampling_params: for all prompts, or one for each; None for the model's own, see
                `get_default_sampling_params`.
            options: adapter, priority and the like, for all prompts, or one for each.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: a prompt or parameter is not valid.
            CapacityError: a prompt and its max_tokens do not fit the context or the KV cache.
        """
        one = isinstance(prompts, str | Mapping)
        listed = [cast(Prompt, prompts)] if one else list(cast("Sequence[Prompt]", prompts))
        params = one_for_each(sampling_params, self._params, len(listed), "sampling_params")
        treated = one_for_each(options, RequestOptions(), len(listed), "options")
        requests = [
            self._engine.prepare(self._next_id(), text_or_ids(prompt), each, how)
            for prompt, each, how in zip(listed, params, treated, strict=True)
        ]
        return self._run(requests, use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Look for the likeliest texts that follow every prompt; see `onnxport.serving.beams`.

        `generate` does the same with `SamplingParams(use_beam_search=True)`, which can say more.

        Args:
            prompts: see `generate`.
            params: for all prompts.
            options: see `generate`.
            use_tqdm: show a progress bar.

        Returns:
            What was found for each prompt, in the order of the prompts.

        Raises:
            RequestError: as `generate`; there are more beams than sequences that run at once.
            CapacityError: as `generate`; the KV cache has no room for all beams.
        """
        outputs = self.generate(prompts, params.sampling(), options=options, use_tqdm=use_tqdm)
        return [BeamSearchOutput.of(output) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several; see `generate`.

        Args:
            messages: the messages of a conversation, or a list of conversations.
            sampling_params: for all conversations, or one for each; None for the model's own, see
                `get_default_sampling_params`. A `thinking_token_budget` without a `thought` is
                about that of the chat template.
            options: adapter, priority and the like, for all conversations, or one for each.
            tools: what the model may call, in OpenAI's shape.
            add_generation_prompt: end the prompt where the model's answer begins.
            chat_template_kwargs: further variables of the chat template, such as
                `{"enable_thinking": False}`; one that it does not have changes nothing.
            use_tqdm: show a progress bar.

        Raises:
            RequestError: the model has no chat template, the template refuses the messages, or
                as `generate`.
            CapacityError: as `generate`.
        """
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not self._template:
            raise RequestError("this model has no chat template; use `generate`", "messages")
        one = bool(messages) and isinstance(messages[0], Mapping)
        listed = cast("Sequence[Sequence[Message]]", [messages] if one else messages)
        variables = variables_of(chat_template_kwargs)
        requests = []
        each = one_for_each(sampling_params, self._params, len(listed), "sampling_params")
        treated = one_for_each(options, RequestOptions(), len(listed), "options")
        for chat, params, how in zip(listed, each, treated, strict=True):
            text = self._template.render(chat, tools, add_generation_prompt, **variables)
            ids = tokenizer.encode(text, add_special_tokens=False)
            params = self._thinking(params, text)
            request = self._engine.prepare(self._next_id(), ids, params, how)
            request.prompt = text
            requests.append(request)
        return self._run(requests, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _thinking(self, params: SamplingParams, prompt: str) -> SamplingParams:
        """Return parameters that know what a thought is, as the template has it, if they ask."""
        if params.thinking_token_budget is None or params.thought is not None:
            return params
        assert self._template is not None
        known = reasoning_format(AUTO, self._template.sources.values())
        thought = None if known is None else known.thought(prompt)
        return with_thought(params, thought, is_known=known is not None)

    def _take(
        self, engine: Engine, template: ChatTemplate | None, defaults: SamplingDefaults
    ) -> None:
        self._engine = engine
        self._template = template
        self._params = SamplingParams(
            **defaults.filled({}), repetition_detection=defaults.repetition_detection
        )
        self._numbers = count()

    def _next_id(self) -> str:
        return str(next(self._numbers))

    def _run(self, requests: Sequence[Request], *, use_tqdm: bool) -> list[RequestOutput]:
        """Run the requests to their ends, and return their outputs."""
        collectors = {request.request_id: OutputCollector(request) for request in requests}
        self._run_into(collectors, requests, use_tqdm=use_tqdm)
        return [collector.output() for collector in collectors.values()]

    def _run_into(
        self, collectors: Mapping[str, Collector], requests: Sequence[Request], *, use_tqdm: bool
    ) -> None:
        """Run the requests to their ends; see `run_to_ends`."""
        run_to_ends(self._engine, requests, collectors, use_tqdm=use_tqdm)
