"""The tools of `/v1/responses`: functions that the client runs, and namespaces of them.

A chat has functions alone. There one of a namespace is called `namespace__name`, as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from onnxport.errors import RequestError
from onnxport.serving.http.protocol import MOST_TOOLS
from onnxport.serving.http.responses_items import Given, by_type

BETWEEN: Final = "__"  # a namespace and a name


class FunctionTool(Given):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def plain(self, name: str) -> dict[str, Any]:
        """Return it as a chat has it, by some name."""
        told = self.model_dump(exclude={"type", "name"}, exclude_none=True)
        return {"type": "function", "function": {"name": name, **told}}


class NamespaceTool(Given):
    """Functions that belong together; what it says of them all is not told to the model."""

    type: Literal["namespace"]
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)]


Tool = Annotated[
    FunctionTool | NamespaceTool,
    by_type(
        {"function": FunctionTool, "namespace": NamespaceTool},
        "a tool",
        "send tools of the types function and namespace, which the client runs. This server has no "
        "tools of its own, such as a search: turn them off in the client",
        "tools",
    ),
]


def in_chat(name: str, namespace: str | None) -> str:
    """Return what a function is called in a chat."""
    return name if namespace is None else f"{namespace}{BETWEEN}{name}"


def functions(tools: Sequence[Tool]) -> Iterator[tuple[FunctionTool, str | None]]:
    """Yield each function, and the namespace it is of."""
    for tool in tools:
        if isinstance(tool, FunctionTool):
            yield tool, None
            continue
        for each in tool.tools:
            yield each, tool.name


def plain(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the functions as a chat has them.

    Raises:
        RequestError: two would be called the same there, so that a call does not tell which.
    """
    chat: list[dict[str, Any]] = []
    known: dict[str, str | None] = {}
    for each, namespace in functions(tools):
        name = in_chat(each.name, namespace)
        if known.setdefault(name, namespace) != namespace:
            raise RequestError(
                f"tools has two functions that the model calls {name[:80]!r}, which is what joins "
                f"the name of a namespace and of its function by {BETWEEN!r}; rename one of them",
                "tools",
            )
        chat.append(each.plain(name))
    return chat


def called(tools: Sequence[Tool]) -> dict[str, dict[str, str]]:
    """Return how calls tell of which function they are, by the names of the chat."""
    return {
        in_chat(each.name, space): {"name": each.name} | ({"namespace": space} if space else {})
        for each, space in functions(tools)
    }


def choice(asked: Any, tools: Sequence[Tool]) -> Any:
    """Return `tool_choice` as a chat has it.

    Raises:
        RequestError: it names no function, or several.
    """
    match asked:
        case None | "auto" | "none" | "required":
            return asked
        case {"type": "function", "name": str(name), **more} if not more:
            names = called(tools)
            found = [name] if name in names else _in_namespaces(name, names)
            if len(found) > 1:
                raise RequestError(
                    f"tool_choice names {name[:80]!r}, and several namespaces have it; name one of "
                    f"{', '.join(found)}"[:400],
                    "tool_choice",
                )
            if found:
                return {"type": "function", "function": {"name": found[0]}}
    raise RequestError(
        f'tool_choice is {repr(asked)[:80]}; use "auto", "none", "required", or '
        '{"type": "function", "name": …} with the name of one of the tools',
        "tool_choice",
    )


def _in_namespaces(name: str, names: dict[str, dict[str, str]]) -> list[str]:
    return [flat for flat, told in names.items() if told["name"] == name]
