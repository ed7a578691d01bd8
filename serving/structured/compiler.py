"""Compiling grammars: once each, in threads of their own, within limits.

llguidance, and what is built on it, is imported with the first grammar: most processes see none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import OnnxportError, OverloadedError, RequestError
from onnxport.serving.grammar import GrammarError
from onnxport.serving.structured.automaton import Automaton
from onnxport.serving.structured.expression import UnknownSyntaxError
from onnxport.serving.structured.json_text import JsonText
from onnxport.serving.structured.kept import KeptMasks, MaskMemory, Places
from onnxport.serving.structured.spec import NAMES, StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary

if TYPE_CHECKING:
    from concurrent.futures import Future

    from llguidance import LLMatcher

    from onnxport.serving.structured.sequence import SequenceGrammar
    from onnxport.serving.structured.source import Content
    from onnxport.serving.structured.threads import CompileThreads

logger = logging.getLogger(__name__)

CLOSED = "the engine is closed and takes no more requests"
NO_TOKENS = array("q")
ROW = 100  # small expressions that are looked at together
NOTHING_FITS = "NoExtension"  # why the library stops where no token may come, and no end either


class _TooLateError(RequestError):
    """Who waited has been told by now, and another time it may take less."""


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What compiling may take.

    Attributes:
        timeout_s: how long a request waits for its grammar.
        num_threads: grammars that are compiled at once.
        max_left: of those that took too long and are still compiled, while others take their turn.
        max_entries: grammars that are kept.
        max_cached_chars: characters of their texts, all together.
        max_grammar_size: symbols of one grammar.
        max_lexer_states: states of the automaton of one sequence, 1 to 2 kB each.
        max_step_items: parser's items of one mask.
        max_row_items: parser's items of one position, some four an optional property.
    """

    timeout_s: float = 10.0
    num_threads: int = 2
    max_left: int = 4
    max_entries: int = 128
    max_cached_chars: int = 1 << 22
    max_grammar_size: int = 200_000
    max_lexer_states: int = 50_000
    max_step_items: int = 50_000
    max_row_items: int = 50_000


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar that any number of sequences can follow."""

    vocabulary: Vocabulary
    template: LLMatcher  # at the beginning; never moved
    kept: MaskMemory | None = None
    goes_back: bool = True  # whether the library can take tokens back
    is_empty: bool = False  # whether only the empty text fits

    def sequence(self, num_prompt_tokens: int) -> SequenceGrammar:
        """Return the grammar of a sequence that begins with a prompt of so many tokens."""
        from onnxport.serving.structured.sequence import SequenceGrammar

        matcher = self.template.deep_copy()
        return SequenceGrammar(
            matcher, self.vocabulary, num_prompt_tokens, self.kept, goes_back=self.goes_back
        )


@dataclass(slots=True, eq=False)
class _Compiling:
    """What is compiled, or will be, and how many wait for it."""

    future: Future[CompiledGrammar]
    num_waiting: int = 0


class GrammarCompiler:
    """Compiles grammars, and keeps those that were used last. Safe to use from any thread."""

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], limits: CompileLimits | None = None
    ) -> None:
        """Compile nothing yet.

        Args:
            vocabulary: reads the model's tokens; called once, when they are first needed.
            limits: None for the defaults.
        """
        self._limits = limits or CompileLimits()
        self._read_vocabulary = vocabulary
        self._threads: CompileThreads | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._masks = KeptMasks()
        # All below and _threads are guarded by _lock, but for _vocabulary, which is by _reading.
        self._cache: OrderedDict[StructuredOutputs, _Compiling] = OrderedDict()
        self._num_chars = 0
        self._closed = False
        self._vocabulary: Vocabulary | None = None

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Return a compiled grammar; waits for it.

        Raises:
            RequestError: it cannot be compiled, or not in time.
            OverloadedError: others were compiled all the time.
            OnnxportError: the engine is closed.
        """
        from concurrent.futures import CancelledError

        with self._awaited(spec) as future:
            with contextlib.suppress(TimeoutError, CancelledError):
                future.exception(self._limits.timeout_s)
            return self._result(spec, future)

    async def prepare(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Return a compiled grammar; waits for it, and blocks no event loop.

        Raises:
            RequestError, OverloadedError: as `compile`.
        """
        import asyncio

        loop, compiled = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Future[CompiledGrammar]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(compiled.set)

        with self._awaited(spec) as future:
            future.add_done_callback(tell)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(compiled.wait(), self._limits.timeout_s)
            return self._result(spec, future)

    def close(self) -> None:
        """Compile nothing more."""
        with self._lock:
            self._closed = True
        if self._threads is not None:
            self._threads.close()

    @contextlib.contextmanager
    def _awaited(self, spec: StructuredOutputs) -> Iterator[Future[CompiledGrammar]]:
        """Give what is compiled, or will be, to one who waits for it.

        Whoever is told that it takes too long may come back for it. But who waits no more, as its
        client is gone, does not: what nobody else waits for is not begun then.
        """
        own = self._submit(spec)
        try:
            yield own.future
        except OnnxportError:
            raise
        except BaseException:
            self._forget(spec, own)
            raise
        finally:
            with self._lock:
                own.num_waiting -= 1

    def _forget(self, spec: StructuredOutputs, own: _Compiling) -> None:
        """Do not compile what the last one waited for, unless that has begun."""
        with self._lock:
            if own.num_waiting == 1 and own.future.cancel() and self._cache.get(spec) is own:
                del self._cache[spec]
                self._num_chars -= spec.num_chars

    def _result(self, spec: StructuredOutputs, future: Future[CompiledGrammar]) -> CompiledGrammar:
        """Return what was compiled, or raise why it was not."""
        if future.cancelled():
            raise OnnxportError(CLOSED)
        if not future.done():
            raise self._late(spec, future)
        try:
            return future.result()
        except RequestError as error:  # which another request may have had first
            raise RequestError(str(error), spec.where) from error

    def _submit(self, spec: StructuredOutputs) -> _Compiling:
        """Return what is compiled, or will be, for one more who waits for it."""
        with self._lock:
            own = self._cache.get(spec)
            if own is None:
                if self._closed:
                    raise OnnxportError(CLOSED)
                if self._threads is None:
                    from onnxport.serving.structured.threads import CompileThreads

                    limits = self._limits
                    self._threads = CompileThreads(
                        limits.num_threads, limits.max_left, "onnxport-grammar"
                    )
                own = _Compiling(self._threads.submit(partial(self._build, spec)))
                self._cache[spec] = own
                self._num_chars += spec.num_chars
                self._evict()
            self._cache.move_to_end(spec)
            own.num_waiting += 1
            return own

    def _evict(self) -> None:
        """Forget what was not used for longest; who still waits for it will get it all the same."""
        limits = self._limits
        while len(self._cache) > 1 and (
            len(self._cache) > limits.max_entries or self._num_chars > limits.max_cached_chars
        ):
            spec, _ = self._cache.popitem(last=False)
            self._num_chars -= spec.num_chars

    def _late(
        self, spec: StructuredOutputs, future: Future[CompiledGrammar]
    ) -> RequestError | OverloadedError:
        """Return the error of a grammar that was not compiled in time."""
        timeout_s = self._limits.timeout_s
        if not (future.running() or future.done()):
            return OverloadedError(
                f"{self._limits.num_threads} other grammars were being compiled for {timeout_s} s; "
                "send the request again later",
                timeout_s,
            )
        if self._threads is not None:
            self._threads.leave(future)
        return RequestError(_too_long(spec, self._limits), spec.where)

    def _build(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Compile a grammar, in one of the threads."""
        start_s = time.monotonic()
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        vocabulary = self._vocabulary
        try:
            compiled = compile_grammar(spec, vocabulary, self._limits, self._masks)
        except _TooLateError:  # so it is begun again for one who comes back for it
            with self._lock:
                if self._cache.pop(spec, None) is not None:
                    self._num_chars -= spec.num_chars
            raise
        logger.debug("compiled a %s in %.3f s", spec.kind, time.monotonic() - start_s)
        return compiled


def compile_grammar(
    spec: StructuredOutputs,
    vocabulary: Vocabulary,
    limits: CompileLimits,
    masks: KeptMasks | None = None,
) -> CompiledGrammar:
    """Compile a grammar, now and here.

    Args:
        spec: the grammar.
        vocabulary: of the model.
        limits: of what compiling may take.
        masks: where masks of this vocabulary are kept; None: they are not.

    Raises:
        RequestError: it is not valid, too large, or nothing fits it.
    """
    from onnxport.serving.structured.source import grammar_of

    name, param = NAMES[spec.kind], spec.where
    # What is wrong with a form is not known before the reasoning ends, so it is looked at alone;
    # so are those of calls and of an answer, of which either may hide what is wrong with the other.
    alone: list[CompiledGrammar] = []
    if spec.thought is not None:
        alone = [compile_grammar(replace(spec, thought=None), vocabulary, limits)]
    elif spec.calls is not None:
        forms = (replace(spec, calls=None), spec.calls)
        alone = [compile_grammar(each, vocabulary, limits) for each in forms]
    elif spec.kind == "structural_tag":
        _check_contents(spec, vocabulary, limits)
    matcher = _matcher(grammar_of(spec, vocabulary.texts), name, param, vocabulary, limits)
    kept = None
    if masks is not None and (places := _places_of(spec, vocabulary)):
        kept = MaskMemory(places, vocabulary.tokens, masks)
    compiled = CompiledGrammar(vocabulary, matcher, kept)
    first_ids = _first_ids(compiled, name, param)
    return replace(
        compiled,
        goes_back=all(each.goes_back for each in alone)
        and _goes_back(matcher.deep_copy(), first_ids),
        is_empty=set(first_ids.tolist()) <= set(vocabulary.tokens.eos_tokens),
    )


def _check_contents(spec: StructuredOutputs, vocabulary: Vocabulary, limits: CompileLimits) -> None:
    """Refuse a structural tag with a content that nothing fits, which shows in a text's middle.

    Small expressions are looked at many at once, and one by one only where something is wrong.

    Raises:
        RequestError: says where, or that it took too long, so that no thread goes on for nobody.
    """
    from onnxport.serving.structured.source import contents_of, row_of

    name, param = NAMES[spec.kind], spec.where
    until = time.monotonic() + limits.timeout_s

    def check(grammar: str, told: str) -> None:
        if time.monotonic() > until:
            raise _TooLateError(_too_long(spec, limits), param)
        matcher = _matcher(grammar, told, param, vocabulary, limits)
        _first_ids(CompiledGrammar(vocabulary, matcher), told, param)

    seen: set[str] = set()
    small: list[tuple[str, Content]] = []
    for each in contents_of(spec, vocabulary.texts):
        if each.grammar in seen:
            continue
        seen.add(each.grammar)
        if each.small is None:
            check(each.grammar, f"{each.place} of {name}")
        else:
            small.append((each.small, each))
    for start in range(0, len(small), ROW):
        row = small[start : start + ROW]
        with contextlib.suppress(RequestError):
            check(row_of(told for told, _ in row), name)
            continue
        for _, each in row:  # which of them is wrong, unless all together are too much
            check(each.grammar, f"{each.place} of {name}")


def _too_long(spec: StructuredOutputs, limits: CompileLimits) -> str:
    return f"{NAMES[spec.kind]} took more than {limits.timeout_s} s to compile; make it smaller"


def _matcher(
    grammar: str, name: str, param: str, vocabulary: Vocabulary, limits: CompileLimits
) -> LLMatcher:
    """Return what follows a grammar, at its beginning.

    Args:
        grammar: as llguidance has it.
        name: what errors call it.
        param: the field of a request that they name.
        vocabulary: of the model.
        limits: of what compiling may take.

    Raises:
        RequestError: it is not valid, or too large.
    """
    from llguidance import LLMatcher, LLParserLimits

    parser_limits = LLParserLimits(
        step_max_items=limits.max_step_items,
        max_items_in_row=limits.max_row_items,
        max_lexer_states=limits.max_lexer_states,
        max_grammar_size=limits.max_grammar_size,
        verbose_errors=False,
    )
    matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=parser_limits)
    reason = (
        matcher.get_error() if matcher.is_error() else "; ".join(matcher.get_grammar_warnings())
    )
    if reason:
        raise RequestError(f"{name} cannot be compiled: {_short(reason)}", param)
    return matcher


def _first_ids(compiled: CompiledGrammar, name: str, param: str) -> NDArray[np.int64]:
    """Return the tokens that a text may begin with.

    Args:
        compiled: a grammar.
        name: what errors call it.
        param: the field of a request that they name.

    Raises:
        RequestError: nothing fits it, or it is too much.
    """
    first = compiled.sequence(0)
    try:
        [mask] = first.masks(NO_TOKENS).copy()
        possible = mask.any() or first.is_complete(NO_TOKENS)
    except GrammarError as error:
        if NOTHING_FITS in str(error):
            raise RequestError(f"no text fits {name}; correct it", param) from error
        raise RequestError(f"{name} is too complex: {_short(str(error))}", param) from error
    if not possible:
        raise RequestError(f"no text fits {name}; correct it", param)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def _goes_back(matcher: LLMatcher, possible: NDArray[np.int64]) -> bool:
    """Whether a matcher can take a token back, which some grammars in Lark's syntax cannot.

    Args:
        matcher: at the beginning; nobody else's.
        possible: the tokens that may come first.
    """
    if len(possible) and matcher.try_consume_tokens([int(possible[0])]):
        matcher.rollback(1)
    return not matcher.is_error()


def _places_of(spec: StructuredOutputs, vocabulary: Vocabulary) -> Places | None:
    """Return what tells the states of a grammar apart, where that is known."""
    if spec.thought is not None or spec.calls is not None:
        return None
    if spec.kind == "json" and spec.whitespace_pattern is None:
        any_object = json.loads(spec.text) == {"type": "object"}
        most_closed = vocabulary.most_closed
        return JsonText(vocabulary.longest_token, most_closed) if any_object else None
    if spec.kind != "regex":
        return None
    try:
        return Automaton(spec.text, vocabulary.longest_token)
    except UnknownSyntaxError as error:
        logger.debug("masks of a regular expression are not kept: %s", error)
        return None


def _short(reason: str) -> str:
    """Return a message of llguidance in one line."""
    return " ".join(reason.split())[:400]
