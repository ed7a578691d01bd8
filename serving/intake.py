"""From prompts to requests: tokenizing, checking, naming; schedules nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from onnxport.errors import RequestError
from onnxport.providers.base import Capabilities
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.adapters.use import Use
from onnxport.serving.beams import BeamGroup, Beginning
from onnxport.serving.classifying import NO_CLASSES, Classifier, ClassPooler
from onnxport.serving.config import EngineConfig, LogprobsMode
from onnxport.serving.dry import dry_of
from onnxport.serving.infill_sampler import infill_rule
from onnxport.serving.limits import beams_total, max_total_tokens, token_array
from onnxport.serving.logprob_limits import check_total, with_counts
from onnxport.serving.logprob_modes import LOGITS
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import NO_EMBEDDINGS, Embedder, Pooler, PoolingParams
from onnxport.serving.request import Request
from onnxport.serving.rules import SequenceRules, check_ids, logit_rules
from onnxport.serving.structured.cache import GrammarCompiler
from onnxport.serving.structured.compiler import CompiledGrammar
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.text import Pieces, TextStream
from onnxport.serving.thought_budget import thought_budget
from onnxport.serving.tokenizer import Tokenizer
from onnxport.serving.truncation import Around, cut

DRAWN: Final[LogprobsMode] = "processed_logprobs"  # `RequestOptions.tells_drawn`
SEED_STEP = 0x9E3779B97F4A7C15  # odd and wild: completions of one request draw their own numbers


class Intake:
    """Makes requests that the engine can run. Safe to use from any thread.

    Attributes:
        grammars: compiles what requests ask of their output; None without a tokenizer.
        embedder: how prompts are embedded; None: none are.
        classifier: how prompts are classified; None: none are.
    """

    def __init__(
        self,
        limits: Capabilities,
        config: EngineConfig,
        max_num_seqs: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        adapters: AdapterRegistry,
        embedder: Embedder | None = None,
        classifier: Classifier | None = None,
    ) -> None:
        """Take the limits that requests are checked against.

        Args:
            limits: of the loaded model.
            config: of the engine.
            max_num_seqs: rows that a step really has.
            tokenizer: None takes token ids only.
            eos_token_ids: tokens that end a generation.
            adapters: those that requests may pick.
            embedder: how prompts are embedded; None: none are.
            classifier: how prompts are classified; None: none are.
        """
        self._sizes = (limits, max_num_seqs)  # replaced as one, whatever thread reads it
        self._config = config
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._adapters = adapters
        self.embedder = embedder
        self.classifier = classifier
        self._seeds = random.Random(config.seed)
        self.grammars: GrammarCompiler | None = None
        if tokenizer is not None:
            read = partial(Vocabulary.build, tokenizer, limits.vocab_size, eos_token_ids)
            self.grammars = GrammarCompiler(read)

    def move_to(self, limits: Capabilities, max_num_seqs: int) -> None:
        """Check requests against the limits of another model from now on."""
        self._sizes = (limits, max_num_seqs)

    def request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        clock: Callable[[], float],
        grammar: CompiledGrammar | None = None,
    ) -> Request:
        """Return a request, its siblings with it; see `Engine.prepare`."""
        if self.embedder is not None and not self.embedder.generates:
            raise RequestError(
                "this model embeds texts and generates none, for it has no head; send the text to "
                "/v1/embeddings (LLM.embed)"
            )
        if self.classifier is not None and not self.classifier.generates:
            raise RequestError(
                "this model judges texts and generates none, for it has a score head in place of "
                "another; send the text to /classify (LLM.classify), or pairs to /rerank or /score "
                "(LLM.score)"
            )
        limits, max_num_seqs = self._sizes
        self._check(prompt, params, options, max_num_seqs)
        params = with_counts(params, self._config.max_logprobs, limits.vocab_size)
        check_ids("logprob_token_ids", params.logprob_token_ids or (), limits.vocab_size)
        encode = None
        if self._tokenizer is not None:
            encode = partial(self._tokenizer.encode_all, add_special_tokens=False)
        text = prompt if isinstance(prompt, str) else None
        tokens = self._tokens(prompt, limits)
        longest = max_total_tokens(
            len(tokens),
            params.max_tokens,
            limits,
            only_prompt=options.only_prompt,
            ends_at_context=options.ends_at_context,
        )
        if params.use_beam_search:
            longest = beams_total(len(tokens), params, longest, limits)
        if params.min_tokens > (room := longest - len(tokens)):
            raise RequestError(
                f"min_tokens is {params.min_tokens}, and after {len(tokens)} tokens of prompt "
                f"there is room for {room}; shorten the prompt or ask for fewer tokens",
                "min_tokens",
            )
        check_total(params, len(tokens) - 1, longest - len(tokens))
        stop_ids = frozenset(params.stop_token_ids)
        end_ids = stop_ids | self._eos_token_ids
        grammar = grammar or self._grammar(params)
        if grammar is not None and grammar.is_empty:
            params = replace(params, min_tokens=0)  # nothing can come but an end
        budget = thought_budget(params, self._tokenizer, limits.vocab_size)
        dry = dry_of(params, self._tokenizer)
        infill = infill_rule(params, self._tokenizer, end_ids)
        rules = logit_rules(params, end_ids, limits.vocab_size, encode, budget, dry)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        use = Use.of(self._adapters.pick(options), tokens)
        keys = None
        if self._config.enable_prefix_caching and params.prompt_logprobs is None:
            keys = use.keys(options.cache_salt, limits.block_size)
            keys.extend(tokens)
        arrival_s = clock()

        num_prompt, prompt_tokens = len(tokens), tokens

        def text_stream() -> TextStream | None:
            if self._tokenizer is None:
                return None
            skips = params.skip_special_tokens
            pieces = self._tokenizer.detokenizer(
                prompt_tokens, skip_special_tokens=skips, spelled=params.spelled_token_ids
            )
            return _text_stream(pieces, params)

        def sequence(index: int) -> Request:
            return Request(
                request_id,
                tokens[:] if index else tokens,
                params,
                max_total_tokens=longest,
                options=options,
                index=index,
                prompt=text,
                stop_token_ids=stop_ids if params.ignore_eos else end_ids,
                seed=seed + index * SEED_STEP,
                arrival_time_s=arrival_s,
                keys=None if index else keys,
                rules=rules,
                grammar=grammar.sequence(len(tokens)) if grammar else None,
                adapter=use.adapter,
                adapter_start=use.start,
                text=text_stream(),
                logprobs_mode=DRAWN if options.tells_drawn else self._config.logprobs_mode,
                infill=infill,
            )

        first = sequence(0)
        first.siblings = tuple(map(sequence, range(1, params.num_sequences)))
        if params.use_beam_search:
            beginning = Beginning(
                lambda: SequenceRules(rules, num_prompt) if rules else None,
                lambda: grammar.sequence(num_prompt) if grammar else None,
                text_stream,
            )
            slots = (first, *first.siblings)
            beams = BeamGroup(slots, beginning)
            for slot in slots:
                slot.beams, slot.text = beams, None
        return first

    def embedding(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: PoolingParams,
        options: RequestOptions,
        clock: Callable[[], float],
    ) -> Request:
        """Return a request for a vector of its prompt; see `Engine.prepare_embedding`."""
        embedder = self.embedder
        if embedder is None:
            raise RequestError(NO_EMBEDDINGS)
        limits, _ = self._sizes
        embedder.check(params, limits.final_features)
        ahead, read = "", prompt
        if isinstance(prompt, str):
            ahead = embedder.prompt(params.prompt_name)
            read = ahead + prompt
        elif params.prompt_name is not None:
            raise RequestError(
                "prompt_name goes with texts, and the prompt is of tokens; leave it out",
                "prompt_name",
            )
        if params.truncate_prompt_tokens is not None:
            longest = min(limits.max_model_len, embedder.max_tokens or limits.max_model_len)
            read = self._cut(read, ahead, params, longest)
        reads_all = embedder.reads_all or params.per_token
        request = self._pooled(request_id, read, options, clock, reads_all=reads_all)
        request.prompt = prompt if isinstance(prompt, str) else None
        embedder.check_tokens(request.num_prompt_tokens)
        request.pooler = Pooler(embedder, params, request.num_prompt_tokens)
        return request

    def _cut(
        self, prompt: str | Sequence[int], ahead: str, params: PoolingParams, longest: int
    ) -> list[int] | str:
        """Return the tokens of a prompt that is cut, but for a text that finds no tokenizer.

        Args:
            prompt: of a request, a text with what goes ahead of it.
            ahead: of the text.
            params: of the request.
            longest: the most tokens that there is room for.
        """
        most = params.truncate_prompt_tokens
        assert most is not None, "it is to be cut"
        around = Around()
        if isinstance(prompt, str):
            if self._tokenizer is None:
                return prompt  # which is refused, as any text is
            tokens = self._tokenizer.encode(prompt)
            around = Around.of(tokens, self._tokenizer.encode(ahead))
        else:
            tokens = list(prompt)
        return cut(tokens, longest if most == -1 else most, around, params.truncation_side)

    def classification(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        options: RequestOptions,
        clock: Callable[[], float],
        *,
        activated: bool,
        per_token: bool,
    ) -> Request:
        """Return a request for numbers of labels; see `Engine.prepare_classification`."""
        if self.classifier is None:
            raise RequestError(NO_CLASSES)
        request = self._pooled(request_id, prompt, options, clock, reads_all=per_token)
        num_tokens = request.num_prompt_tokens
        request.pooler = ClassPooler(
            self.classifier, num_tokens, activated=activated, per_token=per_token
        )
        return request

    def _pooled(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        options: RequestOptions,
        clock: Callable[[], float],
        *,
        reads_all: bool,
    ) -> Request:
        """Return a request that ends with its prompt, and has no pooler yet.

        Args:
            request_id: of it.
            prompt: of it.
            options: of it.
            clock: what time it is.
            reads_all: whether it wants to know what is made of every token.
        """
        limits, max_num_seqs = self._sizes
        # Nothing is drawn. What is cached tells nothing of the tokens that it holds.
        sampling = SamplingParams(
            temperature=0.0, max_tokens=None, skip_reading_prefix_cache=reads_all
        )
        self._check(prompt, sampling, options, max_num_seqs)
        tokens = self._tokens(prompt, limits)
        longest = max_total_tokens(len(tokens), 1, limits, only_prompt=True)
        use = Use.of(self._adapters.pick(options), tokens)
        keys = None
        if self._config.enable_prefix_caching:
            keys = use.keys(options.cache_salt, limits.block_size)
            keys.extend(tokens)
        return Request(
            request_id,
            tokens,
            sampling,
            max_total_tokens=longest,
            options=replace(options, only_prompt=True),
            prompt=prompt if isinstance(prompt, str) else None,
            arrival_time_s=clock(),
            keys=keys,
            adapter=use.adapter,
            adapter_start=use.start,
        )

    def _tokens(self, prompt: str | Sequence[int], limits: Capabilities) -> array[int]:
        """Return the tokens of a prompt; `_check` has seen that a text finds a tokenizer."""
        if not isinstance(prompt, str):
            return token_array(prompt, limits.vocab_size)
        assert self._tokenizer is not None
        self._tokenizer.check_length(prompt, limits.max_model_len)
        return token_array(self._tokenizer.encode(prompt), limits.vocab_size)

    def _grammar(self, params: SamplingParams) -> CompiledGrammar | None:
        """Return what the output has to follow; waits for it to be compiled."""
        if params.structured_outputs is None:
            return None
        if self.grammars is None:
            raise RequestError(
                "structured_outputs need a tokenizer and this engine has none", "structured_outputs"
            )
        return self.grammars.compile(params.structured_outputs)

    def hold_adapter(self, request: Request) -> None:
        """Let a request use what its options mean by now; in the engine's thread.

        Raises:
            UnknownAdapterError: an adapter that it names is loaded no more.
            RequestError: another one has its name, and the rank of a sum became too large.
        """
        had, options = Use(request.adapter, request.adapter_start), request.options
        use = Use.of(self._adapters.pick(options), request.tokens)
        if request.keys is not None and use.content != had.content:
            request.keys = use.keys(options.cache_salt, self._sizes[0].block_size)
            request.keys.extend(request.tokens)
        adapter = None if use.adapter is None else self._adapters.hold(use.adapter)
        for one in (request, *request.siblings):
            one.adapter, one.adapter_start = adapter, use.start

    def _check(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        max_num_seqs: int,
    ) -> None:
        """Refuse what does not depend on the prompt's tokens."""
        if self._tokenizer is None and (isinstance(prompt, str) or params.stop):
            what = "a text prompt" if isinstance(prompt, str) else "a stop string"
            param = "prompt" if isinstance(prompt, str) else "stop"
            raise RequestError(f"{what} needs a tokenizer and this engine has none", param)
        name = "n" if params.num_sequences == params.n else "best_of"
        if params.num_sequences > max_num_seqs:
            raise RequestError(
                f"{name} is {params.num_sequences}, and the engine runs {max_num_seqs} sequences "
                "at once; ask for fewer completions, or raise max_num_seqs",
                name,
            )
        mode = self._config.logprobs_mode
        is_ranked = params.num_sequences > params.n and not params.use_beam_search
        if mode in LOGITS and is_ranked:
            raise RequestError(
                f"best_of is {params.best_of} and n is {params.n}, and completions are compared by "
                f"log probabilities, of which this engine has none (logprobs_mode {mode}); leave "
                "best_of out",
                "best_of",
            )
        if options.priority and self._config.scheduling_policy == "fcfs":
            raise RequestError(
                f"priority is {options.priority}, but this engine serves by arrival "
                "(scheduling_policy fcfs); leave it out, or start the engine with the policy "
                "priority or fair",
                "priority",
            )


def _text_stream(pieces: Pieces, params: SamplingParams) -> TextStream:
    """Return what turns the tokens of a sequence into text and ends it."""
    return TextStream(
        pieces,
        params.stop,
        includes_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
    )
