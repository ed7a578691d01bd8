"""Reasoning in the answers of one request: what is told of it, and how its tokens are counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, NamedTuple

from onnxport.errors import RequestError
from onnxport.serving.channels import Channels
from onnxport.serving.http.job import Job, Run, Usage
from onnxport.serving.http.service import Service, Tokenizer
from onnxport.serving.http.tool_formats.base import Functions, ToolFormat
from onnxport.serving.http.tool_formats.cursor import hidden_places, longest_partial, without
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.reasoning import REASONING_NAMES, splitter
from onnxport.serving.split import Split, Stretch
from onnxport.serving.thought_budget import with_thought
from onnxport.serving.thoughts import Thought

UNUSED: Final = 1 << 62  # a budget that no thought uses up by itself


@dataclass(frozen=True, slots=True)
class Thinking:
    """What is done about reasoning in the answers of one request.

    Attributes:
        is_known: whether it is told from the answer at all.
        thought: what an answer may begin with; None: nothing of it is reasoning.
        is_told: whether the client wants it.
        hidden: special tokens that stand in the text for calls of tools alone; reasoning has none.
        functions: whose calls are messages of their own in the answer.
        spelled: special tokens that have to be in the text.
        budget: of requests that give none.
        is_closed: whether a client may close a thought while it is open.
        answers: see `ReasoningFormat`.
        is_parted: whether it is told apart; else it is a part of the content.
    """

    is_known: bool
    thought: Thought | Channels | None = None
    is_told: bool = True
    hidden: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    spelled: tuple[int, ...] = ()
    budget: int | None = None
    is_parted: bool = True
    is_closed: bool = False
    answers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        service: Service,
        prompt: str,
        continued: str | None = None,
        *,
        is_told: bool = True,
        functions: Functions,
        skip_special_tokens: bool,
        is_limited: bool = True,
        is_parted: bool = True,
    ) -> Thinking:
        """Return what a prompt says.

        Args:
            service: whose model it is.
            prompt: that is answered.
            continued: see `ReasoningFormat.thought`.
            is_told: see the attribute.
            functions: that were offered.
            skip_special_tokens: whether reasoning has none.
            is_limited: whether it has the server's budget where it has none of its own.
            is_parted: see the attribute.

        Raises:
            RequestError: functions were offered, and calls could not be told from thoughts.
        """
        known, tools = service.reasoning, service.tools
        if known is None:
            return cls(False)
        ids = map(service.tokenizer.token_to_id, known.marks)
        thought = known.thought(prompt, continued)
        if thought is not None and functions and not is_parted:
            raise RequestError(
                'reasoning_format is "none", which leaves thoughts in the content, where calls of '
                "tools could not be told from them; leave it out, or send no tools",
                "reasoning_format",
            )
        return cls(
            True,
            thought,
            is_told,
            tools.hidden(functions, skip_special_tokens=skip_special_tokens),
            tuple(functions) if tools.format.has_channels else (),
            tuple(one for one in ids if one is not None),
            service.thinking_token_budget if is_limited else None,
            is_parted,
            answers=known.answers,
        )

    @property
    def parted_thought(self) -> Thought | Channels | None:
        """What is told apart; None: nothing is."""
        return self.thought if self.is_parted else None

    def ending_with(self, calls: ToolFormat | None) -> Thinking:
        """Return what is done where what begins an answer, or calls of a format, ends a thought."""
        if not isinstance(self.thought, Thought):
            return self
        before = self.answers + (calls.ends_thought if calls else ())
        blocks = calls.ends_thought_with if calls else ()
        return replace(self, thought=replace(self.thought, ends_before=before, ends_with=blocks))

    def before(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that let reasoning come before the form they ask for, and bound it.

        Raises:
            RequestError: reasoning has a budget, and it cannot be obeyed.
        """
        if params.thinking_token_budget is None and not _may_forbid_closing(params):
            budget = UNUSED if self._may_close(params) else self.budget
            params = replace(params, thinking_token_budget=budget)
        params = with_thought(params, self.thought, is_known=self.is_known)
        if self.spelled:
            spelled = (*params.spelled_token_ids, *self.spelled)
            params = replace(params, spelled_token_ids=tuple(sorted(set(spelled))))
        form = params.structured_outputs
        if form is None or self.thought is None:
            return params
        return replace(params, structured_outputs=replace(form, thought=self.thought))

    def _may_close(self, params: SamplingParams) -> bool:
        """Whether a budget is needed that is used up where the client says so, and no sooner."""
        return self.is_closed and self.budget is None and params.structured_outputs is None

    def usage(self, job: Job, tokenizer: Tokenizer) -> Usage:
        """Return what counts the tokens of a job."""
        if not self.is_known or not self.is_parted:
            return Usage(job)
        given = self.thought, tokenizer, self.functions
        return Usage(job, [ReasoningCounter(*given) for _ in range(job.num_choices)])

    def fields(self, reasoning: str) -> dict[str, str | None]:
        """Return the fields of a message or of a part of one."""
        if not self.is_known or not self.is_parted:
            return {}
        return dict.fromkeys(REASONING_NAMES, (self.is_told and reasoning) or None)

    def parted(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the answer of a whole text."""
        splits = splitter(self.parted_thought, self.functions).parts(text, is_last=True)
        reasoning = "".join(each.reasoning for each in splits)
        content = "".join(each.content for each in splits)
        return TextFilter(self.hidden).take(reasoning, is_last=True), content


def _may_forbid_closing(params: SamplingParams) -> bool:
    """Whether a budget that nobody asked for could be what a request fails for."""
    some_only = params.allowed_token_ids is not None
    return some_only or bool(params.bad_words) or params.min_tokens > 0


class TextFilter:
    """Takes texts out of one that comes in pieces."""

    def __init__(self, hidden: tuple[str, ...]) -> None:
        self._hidden = hidden
        self._pending = ""  # may be the beginning of one

    def take(self, text: str, *, is_last: bool) -> str:
        """Return what is left of the next piece, and of what was kept back before."""
        self._pending += text
        places = hidden_places(self._pending, self._hidden)
        taken = places[-1][1] if places else 0
        held = 0 if is_last else longest_partial(self._pending[taken:], self._hidden)
        end = len(self._pending) - held
        kept, self._pending = self._pending[:end], self._pending[end:]
        return without(kept, places)


class Piece(NamedTuple):
    """A part of a delta."""

    is_thought: bool
    delta: CompletionDelta


class DeltaSplitter:
    """Splits the deltas of one choice into those of its reasoning and those of its answer."""

    def __init__(self, thinking: Thinking) -> None:
        self._splitter = splitter(thinking.parted_thought, thinking.functions)
        self._filter = TextFilter(thinking.hidden)

    @property
    def has_thought(self) -> bool:
        """Whether reasoning was begun."""
        return self._splitter.has_thought

    @property
    def stretches(self) -> Sequence[Stretch]:
        """Where in the text the answer is, so far."""
        return self._splitter.stretches

    @property
    def num_read(self) -> int:
        """How many characters of the text were told apart; what follows may all be the answer."""
        return self._splitter.num_read

    def take(self, delta: CompletionDelta, runs: Sequence[Run]) -> list[Piece]:
        """Return the parts of a delta, in order; the last one is of the answer, and has its end.

        Args:
            delta: the next one.
            runs: which of its tokens are reasoning.
        """
        if self._splitter.is_over and not any(run.is_thought for run in runs):
            return [Piece(False, delta)]
        is_last = delta.finish_reason is not None
        texts = self._texts(self._splitter.parts(delta.text, is_last=is_last), is_last)
        if not any(is_thought for is_thought, _ in (*texts, *runs)):
            return [Piece(False, replace(delta, text="".join(text for _, text in texts)))]
        parts = [*_merged(texts, runs), (False, "", 0)]
        if len(parts) > 1 and not parts[-2][0]:
            parts.pop()
        pieces, start = [], 0
        for is_thought, text, num_tokens in parts:
            end, logprobs = start + num_tokens, delta.logprobs
            part = replace(
                delta,
                text=text,
                token_ids=delta.token_ids[start:end],
                logprobs=None if logprobs is None else logprobs[start:end],
                finish_reason=None,
                stop_reason=None,
            )
            pieces.append(Piece(is_thought, part))
            start = end
        ends = replace(
            pieces[-1].delta, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
        )
        return [*pieces[:-1], Piece(False, ends)]

    def _texts(self, splits: Sequence[Split], is_last: bool) -> list[tuple[bool, str]]:
        """Return the texts of reasoning and answer, in turns; what is hidden is taken out."""
        parts = [
            (is_thought, text)
            for each in splits
            for is_thought, text in ((True, each.reasoning), (False, each.content))
            if text
        ]
        texts = [
            (is_thought, "".join(text for _, text in group))
            for is_thought, group in groupby(parts, lambda part: part[0])
        ]
        has_ended = is_last or not self._splitter.is_thinking
        if has_ended and not any(is_thought for is_thought, _ in texts):
            texts.insert(0, (True, ""))  # what was kept back
        thoughts = [at for at, (is_thought, _) in enumerate(texts) if is_thought]
        for at in thoughts:
            ends = has_ended or at != thoughts[-1]
            texts[at] = (True, self._filter.take(texts[at][1], is_last=ends))
        return [part for part in texts if part[1]]


def _merged(
    texts: Sequence[tuple[bool, str]], runs: Sequence[Run]
) -> Iterator[tuple[bool, str, int]]:
    """Yield texts and tokens of one kind together, each in their order; texts may come later."""
    waiting = [run for run in runs if run.num_tokens]
    for is_thought, text in texts:
        num_tokens = 0
        if any(run.is_thought == is_thought for run in waiting):
            while waiting[0].is_thought != is_thought:
                yield waiting[0].is_thought, "", waiting.pop(0).num_tokens
            num_tokens = waiting.pop(0).num_tokens
        yield is_thought, text, num_tokens
    for run in waiting:
        yield run.is_thought, "", run.num_tokens


class ReasoningCounter:
    """Counts the tokens of one text that are not of its answer; see `TokenCounter`.

    It reads each token by itself, so it makes no difference when their text was certain.
    """

    def __init__(
        self,
        thought: Thought | Channels | None,
        tokenizer: Tokenizer,
        functions: tuple[str, ...] = (),
    ) -> None:
        self._splitter = splitter(thought, functions)
        self._tokenizer = tokenizer
        self._num_beside = 0

    @property
    def num_tokens(self) -> int:
        """How many there were; tags count, too."""
        return self._num_beside if self._splitter.has_thought else 0

    def add(self, token_ids: Sequence[int]) -> Sequence[Run]:
        """Take the next tokens; returns which of them are reasoning, tags and headers with it."""
        if self._splitter.is_over:
            return (Run(False, len(token_ids)),)
        beside = [self._is_beside(token_id) for token_id in token_ids]
        self._num_beside += sum(beside)
        if not self._splitter.is_framed:
            return (Run(False, len(token_ids)),)
        return [Run(each, len(list(group))) for each, group in groupby(beside)]

    def _is_beside(self, token_id: int) -> bool:
        """Take a token; returns whether it is not of the answer."""
        was_answering = self._splitter.is_answering
        splits = self._splitter.parts(self._tokenizer.token_text(token_id), is_last=False)
        return not was_answering and not any(each.content for each in splits)
