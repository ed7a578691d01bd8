"""JSON Schema's own tests: a schema is enforced in every word, or refused, and it is told why.

What fits an enforced schema may be written, but for what `docs/structured_output.md` says is not,
and nothing else may be.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from onnxport.errors import RequestError
from onnxport.serving.structured.compiler import CompiledGrammar
from onnxport.serving.structured.prepared import prepared
from onnxport.serving.structured.spec import StructuredOutputs
from tests.serving.structured import accepts, compiled
from tests.tiers import every

from .places import SCHEMA_DRAFTS, needs_schema_suite

pytestmark = needs_schema_suite

DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
PAGE = Path(__file__).parents[2] / "docs" / "structured_output.md"
ROWS = re.compile(r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
MOST_ORDERED = 4  # properties of an object, of which all orders are tried
# Why a schema may be refused, as `docs/structured_output.md` has it.
REASONS = (
    r"# ?\S* has the keyword '\S+', which is not supported",
    r"#\S* has '\$?id', which",
    r"\$ref is .*; it must be a JSON pointer into the schema itself",
    r"# refers to .*, where there is no schema",
    r"\$schema is .*; use one of",
    r"/format is .*; it must be one of",
    r"(const|enum) is .*; it must be .* without numbers beyond 2\^53 and control characters",
    r"multipleOf is .*; it must be a number above 0, without its point at most",
    r"oneOf has alternatives that are not visibly exclusive; write anyOf",
    r"patternProperty regexes \S+ and \S+ are not disjoint",
    r"Unsatisfiable schema: schema is false",
    r"unrecognized escape sequence",  # \c of control characters
)
CONTENT = "optional/content.json"  # of texts, which may be checked, says draft 7; later ones do not


@dataclass(frozen=True, slots=True)
class Case:
    """A value, and what the suite says of it."""

    file: str
    described: str
    schema: Any
    value: Any
    fits: bool


@pytest.mark.parametrize("draft", every(len(DRAFTS), DRAFTS))
def test_schemas_of_the_suite_are_enforced_or_refused(draft: str) -> None:
    found, refused = Counter[str](), list[str]()
    for schema, cases in groups(draft):
        try:
            grammar = compiled(StructuredOutputs(json=json.dumps(schema)))
        except RequestError as error:
            found["refused"] += 1
            refused.append(str(error))
            continue
        found["enforced"] += 1
        found.update(checked(grammar, case) for case in cases)
    unclear = [one for one in refused if not any(re.search(why, one) for why in REASONS)]
    assert not unclear
    told = {row[0]: tuple(map(int, row[1:])) for row in ROWS.findall(PAGE.read_text())}
    names = ("enforced", "refused", "written", "kept out", "limit")
    assert tuple(found[name] for name in names) == told[draft]


def groups(draft: str) -> Iterator[tuple[Any, list[Case]]]:
    """Yield the schemas of a draft, and values for each."""
    for file in sorted((SCHEMA_DRAFTS / draft).rglob("*.json")):
        name = str(file.relative_to(SCHEMA_DRAFTS / draft))
        for group in json.loads(file.read_text()):
            schema = group["schema"]
            yield (
                schema,
                [
                    Case(name, one["description"], schema, one["data"], one["valid"])
                    for one in group["tests"]
                ],
            )


def checked(grammar: CompiledGrammar, case: Case) -> str:
    """Return what became of a value: "written", "kept out" or "limit"."""
    compact, wide = spelled(case.value, (",", ":")), spelled(case.value, (",", " : "), indent=2)
    is_written = accepts(grammar, compact)
    assert accepts(grammar, wide) == is_written, case
    if is_written == case.fits:
        return "written" if is_written else "kept out"
    assert case.file == CONTENT if is_written else is_limit(grammar, case), case
    return "limit"


def spelled(value: Any, separators: tuple[str, str], indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, separators=separators, indent=indent)


def is_limit(grammar: CompiledGrammar, case: Case) -> bool:
    """Whether a value that fits is one that the documentation says is not written."""
    texts = [one for one in parts(case.value) if isinstance(one, str)]
    numbers = [one for one in parts(case.value) if isinstance(one, int | float)]
    return (
        any(accepts(grammar, spelled(one, (",", ":"))) for one in others(case.value))
        or any(re.search(r"[\x00-\x07\x0b\x0e-\x1f\ufeff]", one) for one in texts)
        or any(abs(one) > 2**53 for one in numbers)
        or any(re.search(r":60(\D|$)", one) for one in texts)  # leap seconds
        or (case.schema.get("format") == "email" and any(re.search(r'"|\[', x) for x in texts))
        or (case.file == "format.json" and "only an annotation" in case.described)
        or case.described == "ref valid, maxItems ignored"
        or is_of_another_type(case)
    )


def is_of_another_type(case: Case) -> bool:
    """Whether a value has another type than the keywords speak of, where no type is asked for."""
    return not Draft202012Validator(prepared(case.schema, "json").schema).is_valid(case.value)


def others(value: Any) -> Iterator[Any]:
    """Yield the same value in other words: 2 for 2.0, and properties in another order."""
    yield _with_whole_numbers(value)
    if isinstance(value, dict) and len(value) <= MOST_ORDERED:
        for order in permutations(value):
            yield {name: value[name] for name in order}


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_with_whole_numbers, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parts(value: Any) -> Iterator[Any]:
    """Yield the texts, numbers and so on that are in a value."""
    if isinstance(value, list | dict):
        for one in value if isinstance(value, list) else value.values():
            yield from parts(one)
    else:
        yield value
