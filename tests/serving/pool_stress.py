"""Samples on several threads from several Python threads, and forks meanwhile.

    python -m tests.serving.pool_stress ROUNDS

Every result is compared with that of one thread. The interpreter ends while a thread still samples.
Prints how many calls and children there were; ends with an error if one was wrong, or hung.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np

from tests.serving.samplers import native
from tests.serving.sampling_cases import mixed_batch

CHILD_TIMEOUT_S = 100
LOGITS, PARAMS = mixed_batch(40, 33_001)
EXPECTED = native().sample(LOGITS, PARAMS)
assert EXPECTED.logprobs is not None


def check(num_threads: int, num_rows: int) -> None:
    """Sample the first rows."""
    logits = LOGITS[:num_rows].copy()  # a call changes its rows meanwhile
    found = native(num_threads=num_threads).sample(logits, PARAMS[:num_rows])
    assert EXPECTED.logprobs is not None
    assert found.token_ids == EXPECTED.token_ids[:num_rows]
    assert (found.logprobs or [None] * num_rows) == EXPECTED.logprobs[:num_rows]
    assert np.array_equal(logits, LOGITS[:num_rows], equal_nan=True)


def check_often(seed: int, rounds: int) -> None:
    """Sample batches of any size, on any number of threads."""
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        check(int(rng.integers(1, 7)), int(rng.integers(1, len(PARAMS) + 1)))


def check_in_child() -> None:
    """Fork; the child has none of the threads, and has to sample all the same."""
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_TIMEOUT_S)  # ends one that hangs
        try:
            check(4, len(PARAMS))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def main() -> None:
    """Run all of it."""
    rounds = int(sys.argv[1])
    failures: list[BaseException] = []

    def attempt(seed: int) -> None:
        try:
            check_often(seed, rounds)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=attempt, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    num_children = 0
    while any(thread.is_alive() for thread in threads):
        check_in_child()
        num_children += 1
    assert not failures
    assert num_children
    threading.Thread(target=check_often, args=(3, 1 << 30), daemon=True).start()
    check(3, len(PARAMS))
    print(f"{2 * rounds} calls, {num_children} children")


if __name__ == "__main__":
    main()
