"""`onnxport chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from onnxport.cli.adapters import add_adapter_option, request_options
from onnxport.cli.arguments import (
    Commands,
    add_choice_options,
    add_export_options,
    add_load_options,
    add_reasoning_option,
    command,
)
from onnxport.cli.cache import add_source, find_artifact
from onnxport.cli.engine_arguments import add_cache_options, add_speculation_options
from onnxport.cli.model_defaults import (
    add_generation_config,
    add_template_options,
    chat_template,
    sampling_defaults,
    template_text,
)
from onnxport.cli.sampling import add_sampling_options, sampling_params
from onnxport.cli.session import deltas, interruptible, open_session
from onnxport.cli.structure_arguments import add_structure_options, structured_outputs
from onnxport.cli.values import positive
from onnxport.errors import CapacityError, RequestError

if TYPE_CHECKING:
    from onnxport.serving.channels import ChannelFormat, Channels
    from onnxport.serving.chat import ChatTemplate
    from onnxport.serving.defaults import SamplingDefaults
    from onnxport.serving.engine import Engine
    from onnxport.serving.params import RequestOptions, SamplingParams
    from onnxport.serving.reasoning import ReasoningFormat
    from onnxport.serving.request import Request
    from onnxport.serving.split import Split
    from onnxport.serving.structured.spec import StructuredOutputs
    from onnxport.serving.thoughts import Thought

logger = logging.getLogger(__name__)

PROMPT = "> "
DIMMED = ("\x1b[2m", "\x1b[0m\n\n")  # what begins and ends reasoning in a terminal
MARKED = ("<think>\n", "\n</think>\n\n")  # and elsewhere, whatever tags the model has
HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer."


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(commands, "chat", "Talk to a model in the terminal.", run)
    add_source(parser)
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--max-tokens", type=positive, help="most tokens of an answer (as the context allows)"
    )
    add_template_options(parser, "--chat-template-kwargs")
    add_generation_config(add_sampling_options(parser, "the model's"))
    add_structure_options(parser)
    add_reasoning_option(parser)
    parser.add_argument(
        "--thinking-token-budget",
        type=int,
        metavar="N",
        help="tokens of reasoning, behind which the answer begins (no limit)",
    )
    add_load_options(parser)
    add_choice_options(parser)
    add_cache_options(parser)
    add_speculation_options(parser)
    add_adapter_option(parser)
    add_export_options(parser)


def run(options: argparse.Namespace) -> int:
    """Answer line by line until the end of the input."""
    from onnxport.graphs.artifact import Artifact
    from onnxport.serving.defaults import SamplingDefaults
    from onnxport.serving.reasoning_formats import reasoning_format
    from onnxport.serving.thought_budget import with_thought

    form = structured_outputs(options)  # read once, for its file may be a pipe
    _params(options, SamplingDefaults(), form)  # what is wrong is told before a long export
    text = template_text(options)
    artifact = find_artifact(options)
    Artifact.read(artifact)  # says what is wrong with a damaged one
    template = chat_template(artifact, text, options.template_variables)
    if not template:
        raise RequestError(
            f"{options.source} has no chat template, so it cannot chat; give one "
            "(--chat-template), or use `onnxport generate`"
        )
    defaults = sampling_defaults(artifact, options)
    logger.info("unless options say otherwise, answers are sampled with %s", defaults)
    params = _params(options, defaults, form)
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` its history and editing
    reasoning = reasoning_format(options.reasoning_parser, template.sources.values())
    begins = reasoning.thought("") if reasoning else None
    with_thought(params, begins, is_known=reasoning is not None)  # before it is loaded
    texts = reasoning.tags if reasoning else ()
    with open_session(artifact, options, texts) as engine:
        _compile(engine, params)
        _tell(HELP)
        treated = request_options(options)
        _talk(Conversation(engine, template, params, options.system, treated, reasoning))
    return 0


def _params(
    options: argparse.Namespace, defaults: SamplingDefaults, form: StructuredOutputs | None
) -> SamplingParams:
    return replace(
        sampling_params(options, defaults),
        thinking_token_budget=options.thinking_token_budget,
        structured_outputs=form,
    )


def _compile(engine: Engine, params: SamplingParams) -> None:
    """Raise RequestError for a form that cannot be compiled, before anything is said."""
    if params.structured_outputs is not None:
        assert engine.grammars is not None, "a model that chats has a tokenizer"
        engine.grammars.compile(params.structured_outputs)


class Printer:
    """Prints an answer as it comes: what was thought before it dimmed, or between marks."""

    def __init__(self, *, dims: bool) -> None:
        """Begin an answer.

        Args:
            dims: whether the output is a terminal that can.
        """
        self._begins, self._ends = DIMMED if dims else MARKED
        self._is_thinking = False

    def print(self, split: Split) -> None:
        """Print the next piece."""
        if split.reasoning:
            self._print("" if self._is_thinking else self._begins, split.reasoning)
            self._is_thinking = True
        if split.content:
            self.end_thought()
            self._print(split.content)

    def end_thought(self) -> None:
        """Print the end of what was thought, if that is what was printed last."""
        if self._is_thinking:
            self._is_thinking = False
            self._print(self._ends)

    def _print(self, *texts: str) -> None:
        print(*texts, sep="", end="", flush=True)


class Conversation:
    """The messages so far, and how they are answered."""

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        params: SamplingParams,
        system: str | None,
        options: RequestOptions | None = None,
        reasoning: ReasoningFormat | ChannelFormat | None = None,
    ) -> None:
        self._engine = engine
        self._template = template
        self._params = _spelled(engine, params, reasoning)
        self._system = system
        self._options = options
        self._reasoning = reasoning
        self._turns = 0
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages: list[dict[str, str]] = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})

    def answer(self, text: str) -> None:
        """Print the answer as it comes; Ctrl-C ends it, and what was said so far counts.

        What was thought goes into the conversation as such, for the template to decide about.

        Raises:
            CapacityError: the conversation has become too long; the message is forgotten.
            RequestError: the message cannot be read, or does not fit the template; likewise.
        """
        from onnxport.serving.reasoning import REASONING_NAMES
        from onnxport.serving.thought_budget import with_thought

        messages = [*self._messages, {"role": "user", "content": text}]
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        prompt = self._template.render(messages)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        known = self._reasoning
        begins = None if known is None else known.thought(prompt)
        params = with_thought(self._params, begins, is_known=known is not None)
        if (form := params.structured_outputs) is not None:  # which is the answer's
            params = replace(params, structured_outputs=replace(form, thought=begins))
        self._turns += 1
        request = self._engine.prepare(f"turn-{self._turns}", ids, params, self._options)
        thought, said = self._print(request, begins)
        answer = {"role": "assistant", "content": said}
        if thought:
            answer |= dict.fromkeys(REASONING_NAMES, thought)
        self._messages = [*messages, answer]

    def _print(self, request: Request, begins: Thought | Channels | None) -> tuple[str, str]:
        """Run a request, and print the answer as it comes; returns its reasoning and the rest."""
        from onnxport.serving.reasoning import splitter

        splitting = splitter(begins)
        printer = Printer(dims=_can_dim())
        told: list[Split] = []
        reason = None

        def tell(text: str, *, is_last: bool = False) -> None:
            for split in splitting.parts(text, is_last=is_last):
                printer.print(split)
                told.append(split)

        with interruptible() as interruption, closing(deltas(self._engine, [request])) as answer:
            try:
                for delta in answer:
                    reason = delta.finish_reason
                    tell(delta.text)
                    if interruption.asked:
                        break
                tell("", is_last=True)
            finally:
                printer.end_thought()
        print()
        if reason == "repetition":
            _tell("The answer went on repeating itself, and was ended (--repetition-detection).")
        return "".join(one.reasoning for one in told), "".join(one.content for one in told)


def _spelled(
    engine: Engine, params: SamplingParams, reasoning: ReasoningFormat | ChannelFormat | None
) -> SamplingParams:
    """Return parameters with which the text has the marks that tell reasoning from the answer."""
    assert engine.tokenizer is not None
    marks = () if reasoning is None else reasoning.marks
    ids = (engine.tokenizer.token_to_id(mark) for mark in marks)
    known = tuple(one for one in ids if one is not None)
    return replace(params, spelled_token_ids=(*params.spelled_token_ids, *known))


def _talk(conversation: Conversation) -> None:
    """Read lines and answer them until /exit or the end of the input."""
    while True:
        try:
            line = input(PROMPT if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        match line:
            case "":
                continue
            case "/exit":
                return
            case "/reset":
                conversation.reset()
            case _ if line.startswith("/"):
                _tell(f"There is no command {line.split()[0]}. {HELP}")
            case _:
                try:
                    conversation.answer(line)
                except CapacityError as error:
                    _tell(f"{error}. /reset starts a new conversation.")
                except RequestError as error:  # the message is forgotten
                    _tell(f"{error}.")


def _can_dim() -> bool:
    """Whether the output is a terminal that can print dimmed text."""
    return os.name == "posix" and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def _tell(text: str) -> None:
    """Say something that is not the model's."""
    print(text, file=sys.stderr)
