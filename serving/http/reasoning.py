"""Reasoning in the answers of one request: what is told of it, and how its tokens are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxport.serving.http.generation import Job, Usage
from onnxport.serving.http.service import Service, Tokenizer
from onnxport.serving.http.tool_formats.cursor import longest_partial
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.reasoning import REASONING_NAMES, ReasoningSplitter, Thought


@dataclass(frozen=True, slots=True)
class Thinking:
    """What is done about reasoning in the answers of one request.

    Attributes:
        is_known: whether it is told from the answer at all.
        thought: what an answer may begin with; None: nothing of it is reasoning.
        is_told: whether the client wants it.
        hidden: special tokens that stand in the text for calls of tools alone; reasoning has none.
    """

    is_known: bool
    thought: Thought | None = None
    is_told: bool = True
    hidden: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        service: Service,
        prompt: str,
        continued: str | None = None,
        *,
        is_told: bool = True,
        hidden: tuple[str, ...] = (),
    ) -> Thinking:
        """Return what a prompt says; see `ReasoningFormat.thought`."""
        known = service.reasoning
        if known is None:
            return cls(False)
        return cls(True, known.thought(prompt, continued), is_told, hidden)

    def before(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that let reasoning come before the form they ask for."""
        form = params.structured_outputs
        if form is None or self.thought is None:
            return params
        return replace(params, structured_outputs=replace(form, thought=self.thought))

    def usage(self, job: Job, tokenizer: Tokenizer) -> Usage:
        """Return what counts the tokens of a job."""
        if not self.is_known:
            return Usage(job)
        numbers = range(job.num_choices)
        return Usage(job, [ReasoningCounter(self.thought, tokenizer) for _ in numbers])

    def fields(self, reasoning: str) -> dict[str, str | None]:
        """Return the fields of a message or of a part of one."""
        if not self.is_known:
            return {}
        return dict.fromkeys(REASONING_NAMES, (self.is_told and reasoning) or None)

    def parted(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the answer of a whole text."""
        split = ReasoningSplitter(self.thought).take(text, is_last=True)
        return TextFilter(self.hidden).take(split.reasoning, is_last=True), split.content


class TextFilter:
    """Takes texts out of one that comes in pieces."""

    def __init__(self, hidden: tuple[str, ...]) -> None:
        self._hidden = hidden
        self._pending = ""  # may be the beginning of one

    def take(self, text: str, *, is_last: bool) -> str:
        """Return what is left of the next piece, and of what was kept back before."""
        self._pending += text
        for one in self._hidden:
            self._pending = self._pending.replace(one, "")
        held = 0 if is_last else longest_partial(self._pending, self._hidden)
        kept = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(kept) :]
        return kept


class DeltaSplitter:
    """Splits the deltas of one choice into those of its reasoning and those of its answer."""

    def __init__(self, thinking: Thinking) -> None:
        self._splitter = ReasoningSplitter(thinking.thought)
        self._filter = TextFilter(thinking.hidden)

    @property
    def has_thought(self) -> bool:
        """Whether reasoning was begun."""
        return self._splitter.has_thought

    @property
    def answer_start(self) -> int:
        """Where in the text the answer begins; see `ReasoningSplitter`."""
        return self._splitter.answer_start

    def take(
        self, delta: CompletionDelta, num_tokens: int
    ) -> tuple[CompletionDelta | None, CompletionDelta]:
        """Return the part of a delta that is reasoning, if any, and the rest, which has its end.

        Args:
            delta: the next one.
            num_tokens: of its first tokens that are reasoning.
        """
        if self._splitter.is_over and not num_tokens:
            return None, delta
        is_last = delta.finish_reason is not None
        split = self._splitter.take(delta.text, is_last=is_last)
        has_ended = is_last or self._splitter.is_answering
        ids, logprobs = delta.token_ids, delta.logprobs
        thought = replace(
            delta,
            text=self._filter.take(split.reasoning, is_last=has_ended),
            token_ids=ids[:num_tokens],
            logprobs=None if logprobs is None else logprobs[:num_tokens],
            finish_reason=None,
            stop_reason=None,
        )
        rest = replace(
            delta,
            text=split.content,
            token_ids=ids[num_tokens:],
            logprobs=None if logprobs is None else logprobs[num_tokens:],
        )
        return thought, rest


class ReasoningCounter:
    """Counts the tokens of one text before the first one of its answer; see `TokenCounter`.

    It reads each token by itself, so it makes no difference when their text was certain.
    """

    def __init__(self, thought: Thought | None, tokenizer: Tokenizer) -> None:
        self._splitter = ReasoningSplitter(thought)
        self._tokenizer = tokenizer
        self._num_read = 0
        self._is_over = thought is None

    @property
    def num_tokens(self) -> int:
        """How many there were; tags count, too."""
        return self._num_read if self._splitter.has_thought else 0

    def add(self, token_ids: Sequence[int]) -> int:
        """Take the next tokens; returns how many of the first ones are reasoning."""
        if self._is_over:
            return 0
        before = self._num_read
        for token_id in token_ids:
            split = self._splitter.feed(self._tokenizer.token_text(token_id))
            if split.content:
                self._is_over = True
                break
            self._num_read += 1
        return self._num_read - before if self._splitter.has_thought else 0
