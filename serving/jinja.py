"""Jinja for chat templates.

They are rendered in a sandbox, in the environment that `transformers` gives them, so that a prompt
is the one that the model was trained on, character by character.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.ext
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onnxport.errors import RequestError
from onnxport.serving.text import with_halves_escaped

_OF_LISTS: Final = frozenset({"append", "pop"})


def compile_template(text: str, file: str) -> jinja2.Template:
    """Compile a chat template.

    Args:
        text: in Jinja.
        file: where a user corrects it, in words.

    Raises:
        RequestError: it is not valid.
    """
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"the chat template is not valid Jinja: {error.message}, line {error.lineno}. Correct "
            f"{file}.",
            "messages",
        ) from error


def variables_of(text: str) -> frozenset[str]:
    """Return the variables that a chat template reads and does not set before; none, if invalid."""
    from jinja2 import meta

    environment = _environment()
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(text)))
    except jinja2.TemplateSyntaxError:
        return frozenset()  # whoever renders is told


class _Environment(ImmutableSandboxedEnvironment):
    """The environment that `transformers` renders chat templates in, where lists may change.

    Templates of Kimi K2 queue the ids of calls in lists of their own, which `transformers` refuses.
    What a template is given is that of one request.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may reach an attribute of an object."""
        changes_list = type(obj) is list and attr in _OF_LISTS
        return changes_list or super().is_safe_attribute(obj, attr, value)


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}…{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as a class attribute of this type

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Return the body of the block in a scope of its own."""
        scope = Scope(lineno=next(parser.stream).lineno)
        scope.body = list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
        return scope


def _environment() -> _Environment:
    """Return the environment of chat templates, with what `transformers` gives them."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Render JSON without the HTML escapes of Jinja's own filter.

    Arguments of a call may hold half of a character, if the model wrote it as an escape. What
    another filter gives bit by bit, such as `map`, is a list.
    """
    text = json.dumps(
        value,
        default=_listed,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return with_halves_escaped(text)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
