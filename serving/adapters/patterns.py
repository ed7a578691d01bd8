"""Regular expressions of adapters, which strangers wrote: none may take for ever."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from onnxport.errors import AdapterError

TIMEOUT_S: Final = 5.0
_CHOICE: Final = re.compile(r"[*+{|]|(?<!\()\?")  # what lets a match go on in several ways
_SCRIPT: Final = """
import json, re, sys
expressions, names = json.load(sys.stdin)
for expression in expressions:
    for name in names:
        re.match(expression, name)
        re.fullmatch(expression, name)
"""


def check_time(
    path: Path,
    expressions: Sequence[tuple[str, str]],
    names: Sequence[str],
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Refuse expressions that take too long to be matched with names.

    Python's expressions may take time that doubles with each character, cannot be interrupted, and
    let no other thread run meanwhile. So those with two repetitions, options or alternatives and
    more are tried in a process of their own first.

    Args:
        path: of the configuration that has them.
        expressions: sound ones: as they were given, and as they will be matched.
        names: with which they will be matched.
        timeout_s: for all of them.

    Raises:
        AdapterError: they take longer, or cannot be tried.
    """
    risky = [(given, each) for given, each in expressions if len(_CHOICE.findall(given)) > 1]
    if not risky:
        return
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", _SCRIPT],
            input=json.dumps([[each for _, each in risky], names]).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise AdapterError(
            f"{path}: its regular expressions take more than {timeout_s:g} s: "
            f"{risky[0][0][:200]!r}; write them with fewer repetitions, and none inside another, "
            "or name the modules"
        ) from error
    except subprocess.CalledProcessError as error:
        raise AdapterError(
            f"{path}: its regular expressions cannot be tried: Python ended with "
            f"{error.returncode} at {risky[0][0][:200]!r}"
        ) from error
    except OSError as error:
        raise AdapterError(f"{path}: its regular expressions cannot be tried: {error}") from error
