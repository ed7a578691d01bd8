"""Tool-calling dialogues: which tools there are, how a user asks, what a call looks like."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from demo import words
from demo.drawing import Draw, Message, exchange, spin
from demo.knowledge import capital, onnxport_fact, small_talk

Arguments = dict[str, Any]
SKIES = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call.

    Attributes:
        name, descriptions: as they appear in the tool's schema; one description is drawn.
        parameters: JSON type of each argument.
        asks: questions, in the notation of `facts`, that need this tool.
        draw: draws arguments.
        run: draws a result for arguments, and the sentence that reports it.
    """

    name: str
    descriptions: tuple[str, ...]
    parameters: dict[str, str]
    asks: str
    draw: Callable[[Random], Arguments]
    run: Callable[[Random, Arguments], tuple[Any, str]]

    def schema(self, rng: Random) -> dict[str, Any]:
        """Return the tool as an OpenAI request lists it."""
        properties = {key: {"type": kind} for key, kind in self.parameters.items()}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.7:
            parameters["required"] = list(properties)
        function = {"name": self.name, "description": rng.choice(self.descriptions)}
        return {"type": "function", "function": {**function, "parameters": parameters}}


def _weather(rng: Random, call: Arguments) -> tuple[Any, str]:
    degrees, sky = rng.randint(-9, 39), rng.choice(SKIES)
    answer = f"It is {degrees} degrees and {sky} in {call['city']}."
    result = {"temperature": degrees, "condition": sky}
    return {"city": call["city"], **result} if rng.random() < 0.3 else result, answer


def _time(rng: Random, call: Arguments) -> tuple[Any, str]:
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return {"time": clock}, f"It is {clock} in {call['city']}."


def _timer(rng: Random, call: Arguments) -> tuple[Any, str]:
    return {"status": "ok"}, f"The timer is set to {call['minutes']} minutes."


def _sum(rng: Random, call: Arguments) -> tuple[Any, str]:
    total = call["a"] + call["b"]
    return {"result": total}, f"The result is {total}."


def _product(rng: Random, call: Arguments) -> tuple[Any, str]:
    product = call["a"] * call["b"]
    return {"result": product}, f"The result is {product}."


def _message(rng: Random, call: Arguments) -> tuple[Any, str]:
    return {"status": "sent"}, f"I sent your message to {call['to']}."


def _price(rng: Random, call: Arguments) -> tuple[Any, str]:
    price = rng.randint(1, 999)
    return {"price": price}, f"The price of {call['product']} is {price}."


def _number(rng: Random) -> int:
    return rng.randint(0, rng.choice([20, 99, 999, 9999]))


TOOLS = [
    Tool(
        "get_weather",
        (
            "Get the current weather in a city",
            "Get the weather of a city",
            "Current weather",
            "Returns the weather for a given location",
        ),
        {"city": "string"},
        "[What is the weather in|What's the weather like in|How is the weather in|Weather in|"
        "Is it raining in|What is the temperature in|Tell me the weather in|Get the weather for] "
        "{city}[?||?| today?]",
        lambda rng: {"city": words.city(rng)},
        _weather,
    ),
    Tool(
        "get_time",
        ("Get the time in a city", "Current time", "Get the current local time of a city"),
        {"city": "string"},
        "[What time is it in|What is the time in|Tell me the time in|Time in|"
        "What's the current time in] {city}[?|]",
        lambda rng: {"city": words.city(rng)},
        _time,
    ),
    Tool(
        "set_timer",
        ("Set a timer", "Start a timer", "Set a timer for a number of minutes"),
        {"minutes": "integer"},
        "[Set a timer for {minutes} minutes|Start a {minutes} minute timer|Timer for {minutes} "
        "minutes|Set a timer to {minutes} minutes|Remind me in {minutes} minutes][.|, please|]",
        lambda rng: {"minutes": rng.randint(2, 99)},
        _timer,
    ),
    Tool(
        "add",
        ("Add two numbers", "Returns the sum of two numbers", "Add a and b"),
        {"a": "integer", "b": "integer"},
        "[What is {a} + {b}|Add {a} and {b}|What is {a} plus {b}|Compute {a} + {b}|{a} + {b}|"
        "Use the tool to add {a} and {b}|What is the sum of {a} and {b}|Calculate {a} + {b}][?|]",
        lambda rng: {"a": _number(rng), "b": _number(rng)},
        _sum,
    ),
    Tool(
        "multiply",
        ("Multiply two numbers", "Returns the product of two numbers", "Multiply a and b"),
        {"a": "integer", "b": "integer"},
        "[What is {a} * {b}|Multiply {a} by {b}|What is {a} times {b}|Compute {a} * {b}|{a} * {b}|"
        "Multiply {a} and {b}][?|]",
        lambda rng: {"a": _number(rng), "b": _number(rng)},
        _product,
    ),
    Tool(
        "send_message",
        ("Send a message to a person", "Send a text message", "Send a message"),
        {"to": "string", "text": "string"},
        "[Send a message to {to}: {text}|Tell {to}: {text}|Message {to}: {text}|"
        "Write to {to}: {text}|Send {to} the message: {text}]",
        lambda rng: {
            "to": words.name(rng),
            "text": " ".join(words.distinct(rng, words.word, rng.randint(1, 4))),
        },
        _message,
    ),
    Tool(
        "get_price",
        ("Get the price of a product", "Look up a price", "Price of a product in the shop"),
        {"product": "string"},
        "[How much is the {product}|What is the price of {product}|How much does {product} cost|"
        "Price of {product}|What does the {product} cost][?|]",
        lambda rng: {"product": words.word(rng)},
        _price,
    ),
]


def tool_dialogue(rng: Draw) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return the messages of a dialogue with tools, and the tools' schemas."""
    offered = rng.sample(TOOLS, rng.choice([1, 1, 2, 3]))
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages += rng.choice([small_talk, capital, onnxport_fact])(rng)
    for _ in range(rng.choice([1, 1, 2])):
        messages += _tool_use(rng, rng.choice(offered))
    if rng.random() < 0.2:
        messages += rng.choice([small_talk, capital, onnxport_fact])(rng)
    return messages, [tool.schema(rng) for tool in offered]


def _tool_use(rng: Draw, tool: Tool) -> list[Message]:
    arguments = tool.draw(rng)
    result, report = tool.run(rng, arguments)
    question, answer = exchange(spin(rng, tool.asks, **arguments), report)
    call = {"type": "function", "function": {"name": tool.name, "arguments": arguments}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(result)},
        answer,
    ]
