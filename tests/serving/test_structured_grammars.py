"""Regular expressions, choices and grammars; what is refused; compiling within limits."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import unicodedata
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from onnxport.errors import OnnxportError, OverloadedError, RequestError
from onnxport.serving.structured import cache, compiler
from onnxport.serving.structured.cache import GrammarCompiler
from onnxport.serving.structured.compiler import (
    CompiledGrammar,
    CompileLimits,
    compile_grammar,
)
from onnxport.serving.structured.spec import MAX_CHARS, MAX_CHOICES, StructuredOutputs
from onnxport.serving.structured.threads import CompileThreads
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.tokenizer import Tokenizer
from tests.waiting import PATIENCE_S, wait_until

from .structured import LIMITS, accepts, compiled, tokenizer, vocabulary, write

REGEXES = (
    r"\d{3}-\d{4}",
    r"(red|green|blue)( (light|dark))?",
    r"^[a-z]{2,8}@[a-z]{1,5}\.(org|com)$",
    r"[^a-z ]{4}",
    r"(?i)yes|no",
    "é+ü?",
    r"\{\"a\": [0-9]+\}",
    "x{2,4}.y",
)
SUM = (
    'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/\n%ignore / {1,2}/'
)
GBNF = 'root ::= item ("," item)*\nitem ::= "a" | "b" | [0-9]'


@pytest.mark.parametrize("regex", REGEXES)
def test_regex(regex: str) -> None:
    grammar = compiled(StructuredOutputs(regex=regex))
    for seed in range(12):
        text = write(grammar.sequence(3), seed, patience=10)
        # Of characters that this Python's Unicode lacks, re cannot say whether they are digits.
        if text is not None and "Cn" not in map(unicodedata.category, text):
            assert re.fullmatch(regex, text), text
    assert text is not None or regex == "é+ü?"


@pytest.mark.parametrize(
    "choices",
    [
        ("yes", "no"),
        ("a", "ab", "abc"),
        ("naïve café", "日本語", "🙂", "\n", 'quo"te', "back\\slash", "(a|b)*", " "),
        tuple(f"choice {number}" for number in range(500)),
    ],
)
def test_choice(choices: tuple[str, ...]) -> None:
    grammar = compiled(StructuredOutputs(choice=choices))
    texts = {write(grammar.sequence(3), seed) for seed in range(30)}
    assert texts <= set(choices)
    assert len(texts) > 1
    assert all(accepts(grammar, text) for text in choices)
    assert not accepts(grammar, choices[0] + "!")
    assert not accepts(grammar, choices[0][:-1])


def test_lark() -> None:
    grammar = compiled(StructuredOutputs(grammar=SUM))
    for seed in range(12):
        text = write(grammar.sequence(3), seed, patience=10)
        if text is not None:
            names: dict[str, Any] = {"__builtins__": {}}
            assert eval(re.sub(r"\b0+(?=\d)", "", text), names) >= 0
    assert accepts(grammar, "1 + (22 +3)")
    assert not accepts(grammar, "1 +")


def test_gbnf_is_translated() -> None:
    grammar = compiled(StructuredOutputs(grammar=GBNF))
    assert accepts(grammar, "a,b,7")
    assert not accepts(grammar, "a,,b")


def test_tokens_that_are_text_may_be_named_as_such() -> None:
    """The library's syntax for special tokens, where this one is none any more."""
    words = tokenizer()
    fast = FastTokenizer.from_str(words.to_json())
    fast.add_tokens([AddedToken("<call>", special=False)])
    read = Tokenizer(fast, words.eos_token_ids)
    known = Vocabulary.build(read, read.vocab_size, read.eos_token_ids)
    text = 'start: <call> x "<call>" // <call>\nx: /"<call>|<\\/a>/'
    grammar = compile_grammar(StructuredOutputs(grammar=text), known, LIMITS).sequence(0)
    for written in ('<call>"<call><call>', "<call></a><call>"):
        tokens = array("q", read.encode(written, add_special_tokens=False))
        assert grammar.num_possible(array("q"), tokens) == len(tokens)
    with pytest.raises(RequestError, match="unknown special token"):
        compile_grammar(StructuredOutputs(grammar="start: <other>"), known, LIMITS)


def test_schemas_inside_a_grammar_are_as_strict_as_others() -> None:
    text = 'start: "<" json ">"\njson: %json {"format": "date", "type": "string"}'
    grammar = compiled(StructuredOutputs(grammar=text))
    assert accepts(grammar, '<"2024-02-29">')
    assert not accepts(grammar, '<"2023-02-29">')
    named = '{"type": "object", "properties": {"a": {"type": "null"}}}'
    grammar = compiled(StructuredOutputs(grammar=f"start: json\njson: %json {named}"))
    assert accepts(grammar, '{"a":null}')
    assert not accepts(grammar, '{"\\u0061":1}')
    assert not accepts(grammar, "{" + " " * 40 + "}")


def test_what_stands_in_comments_and_texts_is_no_schema() -> None:
    for text in ('start: "a" // see %json {\n', 'start: "%json {}"', r"start: /%json [{]/"):
        grammar = compiled(StructuredOutputs(grammar=text))
        wanted = "a" if "see" in text else "%json {}" if "}" in text else "%json {"
        assert accepts(grammar, wanted)


def test_texts_may_speak_of_a_temperature() -> None:
    """A description of a tool's parameter says how it is written, say."""
    described = '{"type": "null", "description": "as [temperature=20]"}'
    for text, wanted in (
        (f"start: %json {described}", "null"),
        ('start: "[temperature=1]"', "[temperature=1]"),
        ("start: /x[temperature=]{2}/ // [temperature=1]", "xt="),
    ):
        assert accepts(compiled(StructuredOutputs(grammar=text)), wanted)


@pytest.mark.parametrize(
    ("form", "param", "found"),
    [
        ({"regex": "\ud800"}, "regex", "half of a character"),
        ({"grammar": 'start: "\udc00"'}, "grammar", "half of a character"),
        ({"regex": "["}, "regex", "unclosed"),
        ({"regex": r"(a)\1"}, "regex", "backreferences"),
        ({"regex": "a(?!b)"}, "regex", "look-around"),
        ({"regex": r"[^\x00-\x{10FFFF}]"}, "regex", "no text fits"),
        ({"grammar": "start: start"}, "grammar", "no text fits"),
        ({"json": {"$ref": "#"}}, "json", "no text fits"),
        ({"grammar": 'first: "a"'}, "grammar", "no start rule"),
        ({"grammar": 'start: "a" B'}, "grammar", 'unknown name: "B"'),
        ({"grammar": 'start: x\nx[temperature=0.5]: "a"'}, "grammar", "temperature"),
        ({"grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}, "grammar", "options"),
        ({"grammar": 'start: %json {"uniqueItems": true}'}, "grammar", "uniqueItems"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}}'}, "grammar", "x-guidance"),
        ({"grammar": "start: %json {"}, "grammar", "%json"),
        ({"grammar": "root ::= ("}, "grammar", ""),
        ({"grammar": "x" * (MAX_CHARS + 1)}, "grammar", "characters"),
        ({"regex": ""}, "regex", "empty"),
        ({"grammar": " "}, "grammar", "empty"),
        ({"regex": 3}, "regex", "must be a text"),
        ({"json": [1]}, "json", "must be a JSON schema"),
        ({"json": "{"}, "json", "not valid JSON"),
        ({"json": {"const": float("inf")}}, "json", "not valid JSON"),
        ({"json_object": 1}, "json_object", "true or false"),
        ({"choice": []}, "choice", "1 to"),
        ({"choice": [""]}, "choice", "empty"),
        ({"choice": ["a", 1]}, "choice", "texts"),
        ({"choice": "ab"}, "choice", "texts"),
        ({"choice": ["a", "b\ud800"]}, "choice", "half of a character"),
        ({"json": {"propertyNames": {"pattern": "a", "maxLength": 2}}}, "json", "one pattern"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "choice", "1 to"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern", "only"),
        ({"json_object": True, "whitespace_pattern": "["}, "json_object", "unclosed"),
    ],
)
def test_what_is_refused(form: dict[str, Any], param: str, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(StructuredOutputs(**form))
    assert found in str(caught.value)
    assert caught.value.param == f"structured_outputs.{param}"
    assert "\n" not in str(caught.value)


def test_exactly_one_kind() -> None:
    for form in ({}, {"regex": "a", "choice": ["b"]}, {"json": {}, "json_object": True}):
        with pytest.raises(RequestError, match="exactly one") as caught:
            StructuredOutputs(**form)  # type: ignore[arg-type]
        assert caught.value.param == "structured_outputs"
    with pytest.raises(RequestError, match="'xml', which is not supported"):
        StructuredOutputs.from_mapping({"xml": "x"})
    same = StructuredOutputs.from_mapping({"choice": ["a"], "regex": None})
    assert same == StructuredOutputs(choice=("a",))


# Compiling.


class Builds:
    """Counts what is compiled, and may hold it up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        self.go = threading.Event()
        self.go.set()
        really: Callable[..., CompiledGrammar] = cache.compile_grammar

        def build(spec: StructuredOutputs, *rest: Any) -> CompiledGrammar:
            self.texts.append(spec.text)
            assert self.go.wait(PATIENCE_S)
            return really(spec, *rest)

        monkeypatch.setattr(cache, "compile_grammar", build)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    return Builds(monkeypatch)


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def test_a_grammar_is_compiled_once(builds: Builds) -> None:
    made = GrammarCompiler(vocabulary)
    first = made.compile(StructuredOutputs(json={"type": "object"}))
    assert made.compile(StructuredOutputs(json='{"type":"object"}')) is first
    asyncio.run(made.prepare(StructuredOutputs(json='{"type":  "object"}')))
    assert len(builds.texts) == 1
    other = StructuredOutputs(json={"type": "object"}, disable_any_whitespace=True)
    assert made.compile(other) is not first


def test_those_used_last_are_kept(builds: Builds) -> None:
    made = GrammarCompiler(vocabulary, CompileLimits(max_entries=2))
    for text in ("a", "b", "a", "c", "a", "b"):
        made.compile(regex(text))
    assert builds.texts == ["a", "b", "c", "b"]
    small = GrammarCompiler(vocabulary, CompileLimits(max_cached_chars=5))
    del builds.texts[:]
    for text in ("aaa", "bb", "aaa", "cc", "bb", "dddddddd", "dddddddd", "cc"):
        small.compile(regex(text))
    assert builds.texts == ["aaa", "bb", "cc", "bb", "dddddddd", "cc"]


def test_errors_name_the_field_of_each_request(builds: Builds) -> None:
    made = GrammarCompiler(vocabulary)
    for param in ("guided_regex", "elsewhere", None):
        with pytest.raises(RequestError, match="the regex cannot") as caught:
            made.compile(StructuredOutputs(regex="[", param=param))
        assert caught.value.param == (param or "structured_outputs.regex")
    assert len(builds.texts) == 1


def test_nothing_is_compiled_after_the_end() -> None:
    made = GrammarCompiler(vocabulary)
    made.close()
    with pytest.raises(OnnxportError, match="closed"):
        made.compile(regex("a"))


def test_errors_are_kept_too(builds: Builds) -> None:
    made = GrammarCompiler(vocabulary)
    for _ in range(2):
        with pytest.raises(RequestError, match="unclosed"):
            made.compile(regex("["))
        with pytest.raises(RequestError, match="unclosed"):
            asyncio.run(made.prepare(regex("[")))
    assert builds.texts == ["["]


def test_what_is_kept_of_an_error_does_not_grow_with_those_who_ask(builds: Builds) -> None:
    made = GrammarCompiler(vocabulary)
    for number in range(3):
        with pytest.raises(RequestError, match="unclosed") as caught:
            made.compile(StructuredOutputs(regex="[", param=f"field {number}"))
        assert caught.value.__cause__ is not None
        assert caught.value.__cause__.__traceback__ is None  # whose frames hold what was asked
    assert builds.texts == ["["]


def test_too_slow(builds: Builds) -> None:
    """A slow one is a client's mistake; who only waits behind slow ones may come again."""
    patient = CompileLimits(timeout_s=PATIENCE_S, num_threads=1, max_left=0)
    made = GrammarCompiler(vocabulary, patient)
    builds.go.clear()
    first = threading.Thread(target=made.compile, args=(regex("slow"),))
    first.start()
    wait_until(lambda: builds.texts == ["slow"])
    made._limits = replace(patient, timeout_s=0.05)
    with pytest.raises(RequestError, match=r"took more than 0\.05 s"):
        made.compile(regex("slow"))
    with pytest.raises(OverloadedError, match="1 other grammars"):
        made.compile(regex("waits"))
    with pytest.raises(RequestError, match=r"took more than 0\.05 s"):
        asyncio.run(made.prepare(regex("slow")))
    builds.go.set()
    made._limits = patient
    first.join()
    assert accepts(made.compile(regex("slow")), "slow")
    assert accepts(made.compile(regex("waits")), "waits")
    assert builds.texts == ["slow", "waits"]


def test_one_that_never_ends_holds_up_no_other() -> None:
    threads = CompileThreads(1, 2, "test")
    ends = [threading.Event() for _ in range(4)]
    stuck = [threads.submit(end.wait) for end in ends[:3]]
    for number in range(2):
        wait_until(stuck[number].running)
        assert not stuck[number + 1].running()
        threads.leave(stuck[number])
        threads.leave(stuck[number])  # once for each
    wait_until(stuck[2].running)
    late = threads.submit(lambda: "late")
    threads.leave(stuck[2])  # two are left already
    assert not late.done()
    ends[0].set()
    assert stuck[0].result(PATIENCE_S) is True
    assert not late.done()  # who was left behind does nothing more
    threads.leave(stuck[2])
    assert late.result(PATIENCE_S) == "late"
    threads.close()
    for end in ends:
        end.set()


def test_threads_that_are_closed_begin_nothing() -> None:
    threads = CompileThreads(1, 0, "test")
    end = threading.Event()
    stuck, waits = threads.submit(end.wait), threads.submit(end.wait)
    wait_until(stuck.running)
    threads.close()
    assert waits.cancelled()
    end.set()
    assert stuck.result(PATIENCE_S) is True


def test_a_process_ends_beside_one_that_never_does() -> None:
    code = (
        "import threading; from onnxport.serving.structured.threads import CompileThreads; "
        "begun = threading.Event(); "
        "CompileThreads(1, 0, 'x').submit(lambda: (begun.set(), threading.Event().wait())); "
        "begun.wait()"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False)
    assert done.returncode == 0


def test_a_process_that_ends_waits_for_what_the_library_compiles() -> None:
    """For a while: a thread of it that comes back into Python afterwards would end in a crash."""
    code = (
        "from tests.serving.tokenizers_for_tests import EOS, byte_level; "  # and no jsonschema
        "from onnxport.serving.structured.cache import GrammarCompiler; "
        "from onnxport.serving.structured.compiler import CompileLimits; "
        "from onnxport.serving.structured.spec import StructuredOutputs; "
        "from onnxport.serving.structured.vocabulary import Vocabulary; "
        "from onnxport.serving.tokenizer import Tokenizer; "
        "words = Tokenizer(byte_level(), frozenset([byte_level().token_to_id(EOS)])); "
        "known = Vocabulary.build(words, words.vocab_size, words.eos_token_ids); "
        "made = GrammarCompiler(lambda: known, CompileLimits(timeout_s=0.01))\n"
        "names = {f'p{n}': {'enum': [f'{n}-{m}' for m in range(40)]} for n in range(400)}\n"
        "try: made.compile(StructuredOutputs(json={'type': 'object', 'properties': names}))\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "took more than 0.01 s" in done.stdout


def test_the_event_loop_goes_on(builds: Builds) -> None:
    made = GrammarCompiler(vocabulary)
    builds.go.clear()

    async def both() -> None:
        waiting = asyncio.create_task(made.prepare(regex("a")))
        gone = asyncio.create_task(made.prepare(regex("a")))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        gone.cancel()  # one client goes away; the other gets its grammar
        builds.go.set()
        await waiting

    asyncio.run(both())
    assert accepts(made.compile(regex("a")), "a")
    assert builds.texts == ["a"]


def test_more_forms_at_once_than_are_kept(builds: Builds) -> None:
    """Each request takes its own, whatever was forgotten meanwhile: none is compiled twice."""
    made = GrammarCompiler(vocabulary, CompileLimits(max_entries=2))
    builds.go.clear()

    async def burst() -> list[CompiledGrammar]:
        waiting = [asyncio.create_task(made.prepare(regex(text))) for text in "abcdef"]
        await asyncio.sleep(0.02)
        builds.go.set()
        return await asyncio.gather(*waiting)

    grammars = asyncio.run(burst())
    assert [accepts(one, text) for one, text in zip(grammars, "abcdef", strict=True)] == [True] * 6
    assert sorted(builds.texts) == list("abcdef")


def test_who_is_gone_has_nothing_compiled(builds: Builds) -> None:
    limits = CompileLimits(num_threads=1, max_cached_chars=40)
    made = GrammarCompiler(vocabulary, limits)
    builds.go.clear()

    async def burst() -> None:
        first = asyncio.create_task(made.prepare(regex("first")))
        gone = [asyncio.create_task(made.prepare(regex(text))) for text in ("gone", "both", "both")]
        await asyncio.sleep(0.02)
        for each in gone[:2]:
            each.cancel()
        last = asyncio.create_task(made.prepare(regex("last")))
        await asyncio.sleep(0.02)
        builds.go.set()
        await asyncio.gather(first, gone[2], last)

    asyncio.run(burst())
    assert builds.texts == ["first", "both", "last"]
    assert made._num_chars == sum(map(len, builds.texts))
    assert accepts(made.compile(regex("gone")), "gone")


def test_who_waits_is_told_of_the_end(builds: Builds) -> None:
    made = GrammarCompiler(vocabulary, CompileLimits(num_threads=1))
    builds.go.clear()

    async def wait() -> None:
        first = asyncio.create_task(made.prepare(regex("first")))
        second = asyncio.create_task(made.prepare(regex("second")))
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: builds.texts == ["first"])
        made.close()
        with pytest.raises(OnnxportError, match="the engine is closed"):
            await second
        builds.go.set()
        await first

    asyncio.run(wait())


def test_limits_of_size() -> None:
    limits = CompileLimits(max_grammar_size=50)
    many = StructuredOutputs(json={"properties": {f"p{n}": {"type": "null"} for n in range(50)}})
    with pytest.raises(RequestError, match="too big"):
        compiler.compile_grammar(many, vocabulary(), limits)
    compiled(many)


def test_a_thousand_properties_that_may_be_left_out() -> None:
    """The library's own limit of a position, 2,000 items, would be reached after the brace."""
    names = {f"p{n}": {"type": "null"} for n in range(1000)}
    many = StructuredOutputs(json={"properties": names, "type": "object"})
    assert accepts(compiled(many), '{"p3": null, "p999": null}')


def test_the_vocabulary_is_read_once_and_when_needed() -> None:
    read: list[int] = []

    def slowly() -> Vocabulary:
        read.append(1)
        return vocabulary()

    made = GrammarCompiler(slowly)
    assert not read
    threads = [threading.Thread(target=made.compile, args=(regex(text),)) for text in "abcd"]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert read == [1]
