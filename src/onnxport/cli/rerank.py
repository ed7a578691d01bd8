"""`onnxport rerank`: sort texts by how well they go with a query, a line of JSON each."""

from __future__ import annotations

import argparse
import json

from onnxport.cli.adapters import add_adapter_option, request_options
from onnxport.cli.arguments import (
    Commands,
    add_choice_options,
    add_export_options,
    add_load_options,
    add_texts,
    command,
)
from onnxport.cli.cache import add_source, find_artifact
from onnxport.cli.embed import texts_of
from onnxport.cli.engine_arguments import (
    add_cache_options,
    add_embedding_options,
    add_engine_options,
    add_score_template,
)
from onnxport.cli.session import load_engine
from onnxport.cli.values import positive


def add_parser(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands, "rerank", "Sort texts by how well they go with a query, the best first.", run
    )
    add_source(parser)
    parser.usage = "%(prog)s [OPTION ...] MODEL QUERY [TEXT ...]"
    parser.add_argument("query", metavar="QUERY", help="what texts are compared with")
    add_texts(
        parser, "TEXT", "a text to compare", "texts in a file, one a line; empty lines are left out"
    )
    parser.add_argument("--top-n", type=positive, metavar="N", help="print the best N (all)")
    parser.add_argument(
        "--instruction", metavar="TEXT", help="what is looked for (as the score template has it)"
    )
    parser.add_argument(
        "--truncate",
        action="store_true",
        help="leave out the ends of texts that are too long, which are an error else",
    )
    add_score_template(parser)
    add_load_options(parser)
    add_embedding_options(parser)
    add_choice_options(parser)
    add_engine_options(parser)
    add_cache_options(parser)
    add_adapter_option(parser)
    add_export_options(parser)


def run(options: argparse.Namespace) -> int:
    """Compare all texts at once, and print the best first."""
    from onnxport.serving.llm import LLM

    texts = texts_of(options)
    engine = load_engine(find_artifact(options), options)
    with LLM.from_engine(engine) as llm:
        found = llm.rerank(
            options.query,
            texts,
            top_n=options.top_n,
            instruction=options.instruction,
            truncate_prompt_tokens=-1 if options.truncate else None,
            options=request_options(options),
        )
    for one in found:
        told = {"index": one.index, "score": one.relevance_score, "text": one.document}
        print(json.dumps(told, ensure_ascii=False))
    return 0
