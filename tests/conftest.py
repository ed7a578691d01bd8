"""What every test relies on."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.order import by_length

if find_spec("hypothesis") is not None:  # where other wheels are tested, only conformance runs
    from tests.tiers import mark_long, register_profile

    register_profile()

# Before NumPy and PyTorch are loaded, and inherited by child processes. Their matrices are tiny
# here, and threads that spin for work take the processor from pytest's other workers: PyTorch's
# alone took 27 of 38 s of processor time in the tests of parity, RoPE and batches.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--kernels FOLDER`: test the CPU library that lies there, not the one that is installed.

    Processes that tests start have the installed one all the same.
    """
    parser.addoption("--kernels", type=Path, metavar="FOLDER")


def pytest_configure(config: pytest.Config) -> None:
    """Set up what tests and the processes that they start inherit."""
    folder = config.getoption("kernels")
    if folder is not None:
        from onnxport.providers.cpu import library

        library._FOLDER = folder
        assert library.find_library(), f"no CPU library in {folder}"
    _allow_interrupts()
    _know_no_certificates()
    _know_no_iris()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among what is collected, then or later: nothing of it goes.

    It is most of what there is, so whoever looks through all of it takes a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the workers of `make test` begin with what takes longest; see `tests/order.py`."""
    if find_spec("hypothesis") is not None:
        mark_long(items)
    if hasattr(config, "workerinput"):
        items[:] = by_length(items, float(config.getini("timeout")))


def _allow_interrupts() -> None:
    """Let child processes be interrupted.

    A shell starts background jobs with SIGINT ignored, and `nohup` what it starts with SIGHUP, and
    ignored signals are inherited, so the tests that send one to a process would depend on how
    pytest itself was started.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _know_no_certificates() -> None:
    """Let HTTP clients read no certificates: no test speaks TLS.

    Otherwise each client that a test makes reads all that the machine trusts, in up to 50 ms.
    """
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = tempfile.gettempdir()  # files of other names are not looked at


def _know_no_iris() -> None:
    """Let jsonschema not check the formats of IRIs, which we refuse to write.

    For them it builds 38 grammars as it is imported, which takes each worker two seconds.
    """
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
