"""gpt-oss's answers as responses: where items begin and end, and their log probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from onnxport.serving.channels import BREAK, MARKS
from onnxport.serving.outputs import CompletionDelta, FinishReason, Logprob
from onnxport.serving.tokenizer import Tokenizer

from .fake import MODEL, Client
from .harmony import CALL, NEXT, RETURN, TEMPLATE, call, message
from .scripted import write_tokenizer
from .test_responses import LOGPROBS, InPieces, events

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "required": ["x"]},
    "strict": False,
}
USER = {"role": "user", "content": "a"}
GOOD = call("add", '{"x": 1}')
THOUGHT = message("analysis", "hm")
TO_ADD, FINAL, SAID = call("add", ""), message("final", ""), message("commentary", "")
REST = None  # of no message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("oss")
    write_tokenizer(folder, TEMPLATE, MARKS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, frozenset())


def told_of(events: list[dict[str, Any]], name: str, kind: str) -> list[Any]:
    """Return what the deltas of each item say, joined, and what their ends say."""
    deltas: dict[int, Any] = {}
    ends = {}
    for one in events:
        if one["type"] == f"response.{kind}.delta":
            index = one["output_index"]
            deltas[index] = deltas[index] + one[name] if index in deltas else one[name]
        elif one["type"] == f"response.{kind}.done":
            ends[one["output_index"]] = one[name.replace("delta", "text")]
    assert deltas == ends
    return list(deltas.values())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [RETURN, ""])
@pytest.mark.parametrize(
    "parts",
    [
        [(GOOD + NEXT + FINAL, REST), ("yes", 0)],
        [(THOUGHT + NEXT + FINAL, REST), ("yes", 0)],
        [(SAID, REST), ("See. ", 0), (NEXT + GOOD + NEXT + FINAL, REST), ("\n\nyes", 1)],
        [(THOUGHT + NEXT + TO_ADD, REST), ("x = 1", 0), (NEXT + FINAL, REST), ("yes", 0)],
        [
            (SAID, REST),
            ("a", 0),
            (NEXT + TO_ADD, REST),
            ("x = 1", 0),
            (NEXT + FINAL, REST),
            ("b", 0),
        ],
        [(TO_ADD, REST), ("x", 0), (NEXT + TO_ADD, REST), ("y", 0), (NEXT + GOOD, REST)],
        [(THOUGHT + NEXT + TO_ADD, REST), ('{"x":', 0)],  # cut
        [(SAID, REST), ("é", 0), (f"{NEXT}{THOUGHT}{NEXT}{GOOD}{NEXT}{THOUGHT}", REST)],
        [(SAID, REST), ("a", 0), (NEXT + THOUGHT + NEXT + FINAL, REST), (" \n b", 1)],
        [(SAID, REST), ("a", 0), (NEXT + SAID, REST), ("\n\nb", 0)],
        [(f"{THOUGHT}<|end|><|start|>user<|message|>no{NEXT}{FINAL}", REST), ("yes", 0)],
    ],
)
async def test_log_probabilities_of_texts_around_calls(
    tokenizer: Tokenizer, folder: Path, parts: list[tuple[str, int | None]], end: str, size: int
) -> None:
    """A message's are those of its text alone, also in deltas; space before calls is not told."""
    engine = InPieces(tokenizer, ["".join(text for text, _ in parts) + end])
    engine.size = size
    client = Client(engine, folder)
    ask: dict[str, Any] = {"model": MODEL, "input": "x", "tools": [ADD], "include": LOGPROBS}
    output = (await client.post("/v1/responses", **ask)).json()["output"]
    found = [item["content"][0] for item in output if item["type"] == "message"]
    texts: dict[int, list[str]] = {}
    numbers: dict[int, list[int]] = {}
    number = 0
    has_call = any(GOOD in text for text, _ in parts)
    for index, (text, which) in enumerate(parts):
        start, number = number, number + len(tokenizer.encode(text, add_special_tokens=False))
        if which is None:
            continue
        is_before_call = has_call and all(one != which for _, one in parts[index + 1 :])
        kept = text.rstrip() if is_before_call else text
        last = start + len(tokenizer.encode(kept, add_special_tokens=False))
        texts.setdefault(which, []).append(kept)
        numbers.setdefault(which, []).extend(range(start, last))
    assert [part["text"] for part in found] == [BREAK.join(each) for each in texts.values()]
    told = [[-0.5 - one["logprob"] for one in part["logprobs"]] for part in found]
    assert told == list(numbers.values())
    streamed = events((await client.post("/v1/responses", **ask, stream=True)).text)
    assert told_of(streamed, "delta", "output_text") == [part["text"] for part in found]
    assert told_of(streamed, "logprobs", "output_text") == [part["logprobs"] for part in found]


@pytest.mark.parametrize("ends", ["stop", "length"])
async def test_an_answer_without_text_has_no_log_probabilities(
    tokenizer: Tokenizer, folder: Path, ends: FinishReason
) -> None:
    """Also where what was thought is not told."""
    engine = InPieces(tokenizer, [THOUGHT + RETURN], ends)
    client = Client(engine, folder)
    ask: dict[str, Any] = {"model": MODEL, "input": "x", "include": LOGPROBS}
    [item] = (await client.post("/v1/responses", **ask)).json()["output"]
    assert item["type"] == "reasoning"
    engine.answers = [RETURN]
    [item] = (await client.post("/v1/responses", **ask)).json()["output"]
    assert item["content"][0]["text"] == ""
    assert item["content"][0]["logprobs"] == []


class Candidates(dict[int, Logprob]):
    """Log probabilities of a position, of which it can be known that nobody has them."""

    __hash__ = object.__hash__


class Counted(InPieces):
    """Counts at each step how many positions are kept."""

    kept: WeakSet[Candidates]
    most_kept = 0

    async def _stream(self, *given: Any) -> AsyncGenerator[CompletionDelta, None]:
        self.kept = WeakSet()
        async for delta in super()._stream(*given):
            found = tuple(map(Candidates, delta.logprobs or ()))
            self.kept.update(found)
            yield replace(delta, logprobs=found)
            del found, delta
            self.most_kept = max(self.most_kept, len(self.kept))


@pytest.mark.parametrize("before", ["", f"{SAID}See. {NEXT}"])
async def test_log_probabilities_of_reasoning_are_not_kept(
    tokenizer: Tokenizer, folder: Path, before: str
) -> None:
    """There may be tens of thousands of tokens, each with candidates; none is ever told."""
    thoughts = message("analysis", "hm. " * 200)
    engine = Counted(tokenizer, [f"{before}{thoughts}{NEXT}{FINAL}yes{RETURN}"])
    ask: dict[str, Any] = {"model": MODEL, "input": "x", "include": LOGPROBS}
    for tools in ([], [ADD]):
        engine.most_kept = 0
        response = await Client(engine, folder).post("/v1/responses", **ask, tools=tools)
        [part] = response.json()["output"][-1]["content"]
        assert "".join(one["token"] for one in part["logprobs"]) == "yes"
        assert engine.most_kept < 40  # of 800


@pytest.mark.parametrize(
    ("answer", "kinds", "texts"),
    [
        ([SAID + "See.", GOOD, FINAL + "yes"], "mcm", ["See.", "yes"]),
        ([SAID + "See.", GOOD, THOUGHT, FINAL + "\n\nyes"], "mcrm", ["See.", "hm", "\n\nyes"]),
        ([THOUGHT, GOOD, THOUGHT, GOOD, FINAL + "yes"], "rcrcm", ["hm", "hm", "yes"]),
        ([TO_ADD + "x = 1", FINAL + "Sorry."], "m", ["x = 1\n\nSorry."]),
        ([GOOD, TO_ADD + "x = 1", FINAL + "Sorry."], "cm", ["x = 1\n\nSorry."]),
        ([FINAL + "a", THOUGHT, FINAL + " \n b"], "mrm", ["a", "hm", " \n b"]),
        ([FINAL + "a \n\n", THOUGHT, FINAL + "b"], "mrm", ["a \n\n", "hm", "b"]),
        ([FINAL + "a <", THOUGHT, GOOD, FINAL + "b"], "mrcm", ["a <", "hm", "b"]),
        ([GOOD, FINAL + "a <", THOUGHT, FINAL + "b"], "cmrm", ["a <", "hm", "b"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_items_have_the_model_s_own_text(
    tokenizer: Tokenizer,
    folder: Path,
    answer: list[str],
    kinds: str,
    texts: list[str],
    stream: bool,
) -> None:
    """What parts messages in a chat is of no item."""
    client = Client(InPieces(tokenizer, [NEXT.join(answer) + CALL]), folder)
    ask = {"model": MODEL, "input": "x", "tools": [ADD]}
    response = await client.post("/v1/responses", **ask, stream=stream)
    told = events(response.text)[-1]["response"] if stream else response.json()
    names = {"m": "message", "c": "function_call", "r": "reasoning"}
    assert [item["type"] for item in told["output"]] == [names[each] for each in kinds]
    found = [item["content"][0]["text"] for item in told["output"] if "content" in item]
    assert found == texts


@pytest.mark.parametrize(
    "answer",
    [
        [SAID + "See.", GOOD, FINAL + "yes"],
        [SAID + "See.", GOOD, GOOD, FINAL + "yes"],
        [GOOD, FINAL + "yes"],
        [GOOD, THOUGHT, GOOD],
        [TO_ADD + "x = 1", FINAL + "Sorry."],
    ],
)
async def test_what_it_gave_is_the_message_that_a_chat_gives(
    tokenizer: Tokenizer, folder: Path, answer: list[str]
) -> None:
    engine = InPieces(tokenizer, [NEXT.join(answer) + CALL])
    client = Client(engine, folder)
    described = {name: one for name, one in ADD.items() if name != "type"}
    ask: dict[str, Any] = {"model": MODEL, "tools": [ADD]}
    chat: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": described}]}
    given = await client.post("/v1/responses", input=[USER], **ask)
    told = await client.post("/v1/chat/completions", messages=[USER], **chat)
    output, message = given.json()["output"], told.json()["choices"][0]["message"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"r{index}"}
        for index, item in enumerate(one for one in output if one["type"] == "function_call")
    ]
    tools = [
        {"role": "tool", "tool_call_id": one["id"], "content": f"r{index}"}
        for index, one in enumerate(message.get("tool_calls", ()))
    ]
    assert len(tools) == len(results)
    await client.post("/v1/responses", input=[USER, *output, *results, USER], **ask)
    await client.post("/v1/chat/completions", messages=[USER, message, *tools, USER], **chat)
    asked = [tokenizer.decode(one.prompt, skip_special_tokens=False) for one in engine.asked[2:]]
    if THOUGHT not in answer:  # where a chat's message has but one place for thoughts
        assert asked[0] == asked[1]
    parted = asked[0].split("r0")
    assert len(parted) == 1 + bool(results)


async def test_results_are_those_of_their_functions(tokenizer: Tokenizer, folder: Path) -> None:
    sub = {**ADD, "name": "sub"}
    answer = [GOOD, THOUGHT, call("sub", '{"x": 2}')]
    engine = InPieces(tokenizer, [NEXT.join(answer) + CALL])
    client = Client(engine, folder)
    ask: dict[str, Any] = {"model": MODEL, "tools": [ADD, sub]}
    output = (await client.post("/v1/responses", input=[USER], **ask)).json()["output"]
    assert [item["type"] for item in output] == ["function_call", "reasoning", "function_call"]
    ids = {item["name"]: item["call_id"] for item in output if "name" in item}
    for order in (("add", "sub"), ("sub", "add")):
        results = [
            {"type": "function_call_output", "call_id": ids[each], "output": f"of {each}"}
            for each in order
        ]
        await client.post("/v1/responses", input=[USER, *output, *results], **ask)
        text = tokenizer.decode(engine.asked[-1].prompt, skip_special_tokens=False)
        for name in order:
            header = f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
            assert f'{header}"of {name}"<|end|>' in text
