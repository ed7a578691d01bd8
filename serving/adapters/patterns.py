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
_REPEAT: Final = re.compile(r"[*+{]")
_SCRIPT: Final = """
import json, re, sys
expressions, names = json.load(sys.stdin)
for expression in expressions:
    for name in names:
        re.match(expression, name)
        re.fullmatch(expression, name)
"""


def check_time(
    path: Path, expressions: Sequence[str], names: Sequence[str], timeout_s: float = TIMEOUT_S
) -> None:
    """Refuse expressions that take too long to be matched with names.

    Python's expressions may take time that doubles with each character, cannot be interrupted, and
    let no other thread run meanwhile. So those with two repetitions or more are tried in a process
    of their own first.

    Args:
        path: of the configuration that has them.
        expressions: sound ones.
        names: with which they will be matched.
        timeout_s: for all of them.

    Raises:
        AdapterError: they take longer, or cannot be tried.
    """
    risky = [each for each in expressions if len(_REPEAT.findall(each)) > 1]
    if not risky:
        return
    try:
        subprocess.run(
            [sys.executable, "-I", "-c", _SCRIPT],
            input=json.dumps([risky, names]).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise AdapterError(
            f"{path}: its regular expressions take more than {timeout_s:g} s: {risky[0][:200]!r}; "
            "write them with fewer repetitions, and none inside another, or name the modules"
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise AdapterError(f"{path}: its regular expressions cannot be tried: {error}") from error
