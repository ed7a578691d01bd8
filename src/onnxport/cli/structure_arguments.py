"""Options that say what form a text has to have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from onnxport.cli.values import text_of

if TYPE_CHECKING:
    from onnxport.serving.structured.spec import StructuredOutputs

DEFINES = "::="  # in every grammar of GBNF


def add_structure_options(parser: argparse.ArgumentParser) -> None:
    """Add what form the text has to have."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema",
        "--json-schema-file",
        metavar="FILE|JSON",
        help="the text is JSON that this schema describes",
    )
    group.add_argument("--regex", help="the text matches this regular expression")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="the text is one of these; repeatable"
    )
    group.add_argument(
        "--grammar",
        "--grammar-file",
        metavar="FILE|GBNF",
        help="the text follows this grammar, in Lark's form or GBNF, which may be given itself",
    )


def structured_outputs(options: argparse.Namespace) -> StructuredOutputs | None:
    """Return the form that the text has to have; None: any.

    Raises:
        RequestError: the form is not valid, or its file cannot be read.
    """
    from onnxport.serving.structured.spec import StructuredOutputs

    if (schema := options.json_schema) is not None:
        if not schema.lstrip().startswith("{"):
            schema = text_of("--json-schema", Path(schema))
        return StructuredOutputs(json=schema)
    if options.regex is not None:
        return StructuredOutputs(regex=options.regex)
    if options.choice is not None:
        return StructuredOutputs(choice=tuple(options.choice))
    if (grammar := options.grammar) is not None:
        if DEFINES not in grammar:
            grammar = text_of("--grammar", Path(grammar))
        return StructuredOutputs(grammar=grammar)
    return None
