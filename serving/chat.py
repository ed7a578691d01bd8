"""Chat templates: messages in, the model's prompt text out.

A template is the Jinja text that a Hugging Face checkpoint carries; `serving/jinja.py` compiles it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from onnxport.errors import ArtifactError, RequestError
from onnxport.serving.template_messages import (
    Knowledge,
    Message,
    Tool,
    named_variables,
    plain_text,
    texts_of_user,
)

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"
LEGACY_FILE = "chat_template.json"
TEMPLATE_FOLDER = "additional_chat_templates"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
DEFAULT = "default"
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
_LACKS: Final = re.compile(r"'(\w+)' is undefined")  # as Jinja says it
# A part of a list where a text should be, as Jinja writes it, or as JSON.
_PART_AS_TEXT: Final = re.compile(r"""['"]type['"]: ?['"]text['"]""")
_MARK = "<|onnxport goes on here|> "  # the space tells whether messages are trimmed
# A function that no text speaks of, to see whether a template does.
_PROBE: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": "onnxport_probe",
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "a text"}},
            "required": ["text"],
        },
    },
}
TOOL_USE = "tool_use"  # the name of the template that checkpoints keep for requests with tools


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat templates of one model.

    Attributes:
        sources: template name -> Jinja text; empty when the model has none. `default` serves every
            request, except that `tool_use`, where there is one, serves those with tools.
        special_tokens: `bos_token`, `eos_token`, …, as the templates read them.
        variables: further variables of the templates, where whoever renders sets none of that name.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    _compiled: dict[str, jinja2.Template] = field(default_factory=dict, compare=False, repr=False)
    _names: dict[str, frozenset[str]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def read(cls, folder: Path) -> ChatTemplate:
        """Read the templates of a model folder; one without a template gives an empty set.

        `chat_template.jinja` wins over the `chat_template` of `tokenizer_config.json`, which is a
        text or a list of named texts. Those of `additional_chat_templates` have names, too, and may
        be there without it.

        Raises:
            ArtifactError: a file is there but is not what it should be.
        """
        config = _read_json(folder / TOKENIZER_CONFIG)
        legacy = _read_json(folder / LEGACY_FILE)
        entry = config.get("chat_template") or legacy.get("chat_template")
        sources = _named_templates(entry, folder / TOKENIZER_CONFIG)
        if (folder / TEMPLATE_FILE).is_file():
            sources = {DEFAULT: (folder / TEMPLATE_FILE).read_text(encoding="utf-8")}
        for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
            sources[path.stem] = path.read_text(encoding="utf-8")
        tokens = _special_tokens(_read_json(folder / SPECIAL_TOKENS)) | _special_tokens(config)
        return cls(sources, tokens)

    def __bool__(self) -> bool:
        """Whether the model has a template at all."""
        return bool(self.sources)

    def knows(self, variable: str) -> bool:
        """Whether a template reads a variable that whoever renders may set."""
        return any(variable in self._reads(name) for name in self.sources)

    def source(self, *, with_tools: bool) -> str:
        """Return the text of the template that requests with tools, or without, are rendered by."""
        name = TOOL_USE if with_tools and TOOL_USE in self.sources else DEFAULT
        return self.sources.get(name, "")

    def tells_tools(self) -> bool:
        """Whether prompts tell the model of the tools that a request offers."""
        try:
            return _PROBE["function"]["name"] in self.render(
                [{"role": "user", "content": "hello"}], [_PROBE]
            )
        except RequestError:  # it wants other messages; what it says is all there is to go by
            return "tools" in self.source(with_tools=True)

    def render(
        self,
        /,  # a template may have a variable of that name
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for a conversation.

        Args:
            messages: in OpenAI's shape; lists of text parts are joined by ends of lines (and given
                as one part to a template that goes through parts and knows no plain text), but
                several of a user's are left to a template that goes through them. `arguments` of
                earlier tool calls are given to the template as objects (as text, where it cannot
                take those), and a `developer` message is a `system` message unless the template
                knows that role.
            tools: function declarations, handed to the template as they are.
            add_generation_prompt: end with the start of an assistant message.
            continue_final_message: end in the middle of the last message, so that what is generated
                is the rest of it, as transformers has it.
            documents: that the answer may draw on, for templates that tell the model of such.
            variables: further variables of the template, such as `enable_thinking`; they go before
                its own.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message goes on with the last message, and "
                    "add_generation_prompt begins another one; send one of them",
                    "continue_final_message",
                )
            marked = self.render(_marked(messages), tools, False, documents=documents, **variables)
            return _cut(marked)
        name = TOOL_USE if tools and TOOL_USE in self.sources else DEFAULT
        template = self._template(name)
        given = {
            **self.special_tokens,
            **named_variables(self._reads(name), tools),
            **self.variables,
            **variables,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }

        def render(knows: Knowledge) -> str:
            told = {"messages": knows.messages(messages), "tools": knows.tools(tools)}
            # A template may append to lists, and these are read again: by other tries and requests.
            return template.render(deepcopy({**given, **told}))

        try:
            return _first_rendered(render, Knowledge.of(self.sources[name]), messages)
        except RequestError:
            raise
        except Exception as error:  # whatever the model's own code raises
            raise _unrendered(error) from error

    def _reads(self, name: str) -> frozenset[str]:
        """Return the variables that the template `name` reads; none, if it is not valid."""
        if name not in self._names:
            from onnxport.serving.jinja import variables_of

            self._names[name] = variables_of(self.sources[name])
        return self._names[name]

    def _template(self, name: str) -> jinja2.Template:
        """Return the compiled template `name`."""
        if name not in self.sources:
            found = f"only templates named {sorted(self.sources)}" if self.sources else "none"
            raise RequestError(
                f"this model cannot chat: a chat template is needed and the model has {found}. "
                f"Send a plain prompt (/v1/completions, `onnxport generate`), or add "
                f"{TEMPLATE_FILE} to the model's folder.",
                "messages",
            )
        if name not in self._compiled:
            # Jinja is imported with the first conversation: who sends plain prompts has none.
            from onnxport.serving.jinja import compile_template

            file = f"{TEMPLATE_FILE} in the model's folder"
            self._compiled[name] = compile_template(self.sources[name], file)
        return self._compiled[name]


def _first_rendered(
    render: Callable[[Knowledge], str], knows: Knowledge, messages: Sequence[Message]
) -> str:
    """Return what a template makes of messages, in the first form that it takes.

    Args:
        render: by what the template is taken to speak of.
        knows: what it speaks of.
        messages: that are rendered.
    """
    import jinja2

    def in_other_forms(knows: Knowledge) -> str:
        try:
            return render(knows)
        except TypeError:
            # Arguments are put beside texts, or tools are gone through that are not there.
            for other in ({"text_arguments": True}, {"lists_tools": True}):
                with suppress(Exception):
                    return render(replace(knows, **other))
            raise

    def rendered(knows: Knowledge) -> str:
        if knows.no_content:
            # It may take it for a text as well. It may also leave out calls beside one, so that
            # everything else is tried first.
            with suppress(TypeError, jinja2.UndefinedError):
                return in_other_forms(knows)
        return in_other_forms(replace(knows, no_content=False))

    if texts := [t for m in messages for t in texts_of_user(m)]:
        with suppress(Exception):  # it goes through none, or through those of other roles alone
            found = rendered(replace(knows, keeps_parts=True))
            is_list = _PART_AS_TEXT.search(found) is not None
            if not is_list and all(text.strip() in found for text in texts):
                return found
    return rendered(knows)


def _unrendered(error: Exception) -> RequestError:
    """Return what a client is told of what a template has raised."""
    what = str(error).rstrip(".")
    lacking = _LACKS.fullmatch(what)
    if lacking is not None:
        return RequestError(
            f"the model's chat template reads a variable {lacking[1]!r}, which nothing sets; send "
            "it in chat_template_kwargs",
            "chat_template_kwargs",
        )
    return RequestError(
        f"the model's chat template cannot render these messages: {what}. Check the order and the "
        "roles of the messages against what the model expects.",
        "messages",
    )


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with a mark at the end of the last one's text."""
    last = messages[-1]
    content = last.get("content") or ""
    if not plain_text(content) or last.get("tool_calls"):
        raise RequestError(
            "continue_final_message was given, and the last message has no text to go on with, or "
            "tool calls behind it",
            "continue_final_message",
        )
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": content + _MARK}]
    *before, part = content
    part = {**part, part["type"]: (part.get(part["type"]) or "") + _MARK}
    return [*messages[:-1], {**last, "content": [*before, part]}]


def _cut(rendered: str) -> str:
    """Return the text before the mark; the template may trim messages, and then so is this."""
    before, mark, after = rendered.rpartition(_MARK.rstrip())
    if not mark:
        raise RequestError(
            "continue_final_message was given, and the model's chat template does not write the "
            "last message as it is",
            "continue_final_message",
        )
    return before if after.startswith(_MARK[-1]) else before.rstrip()


def check_variables(variables: Mapping[str, Any] | None) -> None:
    """Refuse variables of a template that requests have fields for.

    Raises:
        RequestError: names them.
    """
    if reserved := RESERVED & (variables or {}).keys():
        raise RequestError(
            f"chat_template_kwargs sets {sorted(reserved)}, which the request itself sets; "
            "remove them",
            "chat_template_kwargs",
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`, or an empty one when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path.name} is not valid JSON: {error}. Export again.") from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path.name} does not hold an object. Export again.")
    return value


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """Return name -> text from a `chat_template` entry: none, a text, or a list of named texts."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError) as error:
        raise ArtifactError(
            f"chat_template in {path.name} is neither a text nor a list of named templates. "
            "Correct it, or remove it and serve completions alone."
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the `…_token` entries: texts, or objects with the text under `content`."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
