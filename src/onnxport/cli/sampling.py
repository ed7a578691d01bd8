"""Options of how tokens are chosen."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from onnxport.cli.model_defaults import add_repetition_option
from onnxport.cli.values import logit_bias
from onnxport.errors import RequestError

if TYPE_CHECKING:
    from onnxport.serving.defaults import SamplingDefaults
    from onnxport.serving.params import SamplingParams

LLAMA_CPP: tuple[tuple[str, Any, str], ...] = (  # option, type, meaning
    (
        "--top-n-sigma",
        float,
        "keep logits at most so many standard deviations below the largest (0: all)",
    ),
    ("--xtc-probability", float, "how often the likeliest choices are left out (0)"),
    ("--xtc-threshold", float, "how probable a choice is to be a likely one (0.1)"),
    (
        "--dry-multiplier",
        float,
        "above 0 makes tokens that go on with a repetition less likely (0)",
    ),
    ("--dry-base", float, "how much less by each token of the repetition (1.75)"),
    ("--dry-allowed-length", int, "tokens of the shortest repetition that counts (2)"),
    ("--dry-penalty-last-n", int, "tokens in which repetitions are looked for (-1: all)"),
    (
        "--repeat-last-n",
        int,
        "the penalties count so many of the last tokens, of prompt and answer, -1 all (the "
        "repetition penalty all of both, the others all of the answer)",
    ),
    (
        "--dynatemp-range",
        float,
        "the temperature moves by up to this, down where the model is sure, and up (0)",
    ),
    ("--dynatemp-exponent", float, "the power of how unsure the model is (1)"),
    ("--mirostat", int, "1 or 2 keep the surprise of tokens near a target, 0 does not (0)"),
    ("--mirostat-tau", float, "how much tokens are to surprise, in bits (5)"),
    ("--mirostat-eta", float, "which part of what is missing to it each token makes up for (0.1)"),
    (
        "--adaptive-target",
        float,
        "keep the probability of tokens, of what all else leaves, near this; below 0 do not (-1)",
    ),
    ("--adaptive-decay", float, "how much each token counts for that beside the next one (0.9)"),
)


def add_sampling_options(
    parser: argparse.ArgumentParser, defaults: str | None = None
) -> argparse._ArgumentGroup:
    """Add how tokens are chosen, and return the group.

    Args:
        parser: of the command.
        defaults: where values come from that are not given, in words; None: 0 as the temperature,
            and what changes nothing for the others.
    """
    group = parser.add_argument_group("sampling")

    def otherwise(neutral: str) -> str:
        return f"({defaults or neutral})"

    group.add_argument(
        "--temperature",
        type=float,
        help=f"0 takes the likeliest token {otherwise('0')}",
    )
    group.add_argument(
        "--top-p",
        type=float,
        help=f"keep the likeliest tokens whose probabilities add up to this {otherwise('1')}",
    )
    group.add_argument(
        "--top-k", type=int, help=f"keep so many of the likeliest tokens, 0 all {otherwise('all')}"
    )
    group.add_argument(
        "--min-p",
        type=float,
        help="keep tokens at least this fraction as probable as the likeliest " + otherwise("0"),
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        help="above 1 makes tokens of prompt and answer less likely " + otherwise("1"),
    )
    group.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        help="taken from the logits of tokens in the answer (0)",
    )
    group.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        help="taken from them as often as they are there (0)",
    )
    group.add_argument(
        "--typical-p",
        type=float,
        help="keep the tokens that surprise as much as is expected, whose probabilities add up to "
        "this " + otherwise("1"),
    )
    for option, kind, meaning in LLAMA_CPP:
        group.add_argument(option, type=kind, help=meaning)
    group.add_argument(
        "--dry-sequence-breaker",
        action="append",
        dest="dry_sequence_breakers",
        metavar="TEXT",
        help="DRY looks for no repetition across it; repeatable (an end of a line, a colon, a "
        "quotation mark, an asterisk)",
    )
    group.add_argument("--seed", type=int, help="makes sampled text reproducible")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; repeatable"
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        type=logit_bias,
        default=[],
        metavar="TOKEN_ID(+/-)BIAS",
        help="added to a token's logit, as in 42-100 or 7+1.5; repeatable",
    )
    add_repetition_option(group)
    return group


def sampling_params(options: argparse.Namespace, defaults: SamplingDefaults) -> SamplingParams:
    """Return the decoding parameters; the defaults where an option was not given.

    Raises:
        RequestError: a value is out of its range, or a token has two biases.
    """
    from onnxport.serving.params import SamplingParams

    tokens = [token_id for token_id, _ in options.logit_bias]
    if twice := [token_id for token_id in tokens if tokens.count(token_id) > 1]:
        raise RequestError(f"--logit-bias has the token {twice[0]} twice; give each once")
    names = (option.removeprefix("--").replace("-", "_") for option, _, _ in LLAMA_CPP)
    given = {name: getattr(options, name) for name in (*names, "dry_sequence_breakers")}
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        **defaults.filled(vars(options)),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        stop=tuple(options.stop),
        logit_bias=dict(options.logit_bias),
        repetition_detection=options.repetition_detection,
        max_tokens=options.max_tokens,
    )
