"""From prompts to requests: tokenizing, checking, naming; schedules nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from onnxport.errors import RequestError
from onnxport.kv.prefix import KeyChain
from onnxport.providers.base import Capabilities
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.adapters.use import Use
from onnxport.serving.beams import BeamGroup, Beginning
from onnxport.serving.classifying import NO_CLASSES, Classifier, ClassPooler
from onnxport.serving.config import EngineConfig, LogprobsMode
from onnxport.serving.dry import dry_of
from onnxport.serving.infill_sampler import InfillRule, infill_rule
from onnxport.serving.intake_checks import (
    check_completions,
    check_generates,
    check_priority,
    check_without_tokenizer,
)
from onnxport.serving.limits import beams_total, max_total_tokens, token_array
from onnxport.serving.logprob_limits import check_total, with_counts
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import NO_EMBEDDINGS, Embedder, Pooler, PoolingParams
from onnxport.serving.request import Request
from onnxport.serving.rules import LogitRules, SequenceRules, check_ids, logit_rules
from onnxport.serving.structured.cache import GrammarCompiler
from onnxport.serving.structured.compiler import CompiledGrammar
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.text import TextStream
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
        """Return a request, its siblings with it; see `Preparing.prepare`."""
        check_generates(self.embedder, self.classifier)
        limits, max_num_seqs = self._sizes
        self._check(prompt, params, options, max_num_seqs)
        params = with_counts(params, self._config.max_logprobs, limits.vocab_size)
        check_ids("logprob_token_ids", params.logprob_token_ids or (), limits.vocab_size)
        text = prompt if isinstance(prompt, str) else None
        tokens = self._tokens(prompt, limits)
        longest = _longest(len(tokens), params, options, limits)
        check_total(params, len(tokens) - 1, longest - len(tokens))
        stop_ids = frozenset(params.stop_token_ids)
        end_ids = stop_ids | self._eos_token_ids
        grammar = grammar or self._grammar(params)
        if grammar is not None and grammar.is_empty:
            params = replace(params, min_tokens=0)  # nothing can come but an end
        rules, infill = self._rules(params, end_ids, limits.vocab_size)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        use = Use.of(self._adapters.pick(options), tokens)
        keys = self._keys(use, options, tokens, limits) if params.prompt_logprobs is None else None
        arrival_s = clock()
        text_stream = partial(self._text_stream, params, tokens)

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
            _search(first, rules, grammar, text_stream)
        return first

    def _rules(
        self, params: SamplingParams, end_ids: frozenset[int], vocab_size: int
    ) -> tuple[LogitRules | None, InfillRule | None]:
        """Return what a request wants changed in its logits, and of its sampler; None: nothing."""
        encode = None
        if self._tokenizer is not None:
            encode = partial(self._tokenizer.encode_all, add_special_tokens=False)
        budget = thought_budget(params, self._tokenizer, vocab_size)
        dry = dry_of(params, self._tokenizer)
        infill = infill_rule(params, self._tokenizer, end_ids)
        return logit_rules(params, end_ids, vocab_size, encode, budget, dry), infill

    def _keys(
        self, use: Use, options: RequestOptions, tokens: array[int], limits: Capabilities
    ) -> KeyChain | None:
        """Return what the blocks of a prompt are called; None: they are not shared."""
        if not self._config.enable_prefix_caching:
            return None
        keys = use.keys(options.cache_salt, limits.block_size)
        keys.extend(tokens)
        return keys

    def _text_stream(self, params: SamplingParams, prompt: array[int]) -> TextStream | None:
        """Return what turns the tokens of a sequence into text and ends it; None: nothing does."""
        if self._tokenizer is None:
            return None
        skips = params.skip_special_tokens
        pieces = self._tokenizer.detokenizer(
            prompt, skip_special_tokens=skips, spelled=params.spelled_token_ids
        )
        return TextStream(
            pieces,
            params.stop,
            includes_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def embedding(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: PoolingParams,
        options: RequestOptions,
        clock: Callable[[], float],
    ) -> Request:
        """Return a request for a vector of its prompt; see `Preparing.prepare_embedding`."""
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
        """Return a request for numbers of labels; see `Preparing.prepare_classification`."""
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
        return Request(
            request_id,
            tokens,
            sampling,
            max_total_tokens=longest,
            options=replace(options, only_prompt=True),
            prompt=prompt if isinstance(prompt, str) else None,
            arrival_time_s=clock(),
            keys=self._keys(use, options, tokens, limits),
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
        if self._tokenizer is None:
            check_without_tokenizer(prompt, params)
        check_completions(params, self._config.logprobs_mode, max_num_seqs)
        check_priority(options, self._config.scheduling_policy)


def _longest(
    num_tokens: int, params: SamplingParams, options: RequestOptions, limits: Capabilities
) -> int:
    """Return how many tokens a sequence may have, prompt and output.

    Raises:
        CapacityError: there is not room for them, nor for a part where that would do.
        RequestError: it has to have more.
    """
    longest = max_total_tokens(
        num_tokens,
        params.max_tokens,
        limits,
        only_prompt=options.only_prompt,
        ends_at_context=options.ends_at_context,
    )
    if params.use_beam_search:
        longest = beams_total(num_tokens, params, longest, limits)
    if params.min_tokens > (room := longest - num_tokens):
        raise RequestError(
            f"min_tokens is {params.min_tokens}, and after {num_tokens} tokens of prompt "
            f"there is room for {room}; shorten the prompt or ask for fewer tokens",
            "min_tokens",
        )
    return longest


def _search(
    first: Request,
    rules: LogitRules | None,
    grammar: CompiledGrammar | None,
    text_stream: Callable[[], TextStream | None],
) -> None:
    """Make a sequence and its siblings the slots of a beam search."""
    num_prompt = first.num_prompt_tokens
    beginning = Beginning(
        lambda: SequenceRules(rules, num_prompt) if rules else None,
        lambda: grammar.sequence(num_prompt) if grammar else None,
        text_stream,
    )
    slots = (first, *first.siblings)
    beams = BeamGroup(slots, beginning)
    for slot in slots:
        slot.beams, slot.text = beams, None
