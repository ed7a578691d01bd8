"""What every test relies on."""

import os
import signal
import tempfile
from importlib.util import find_spec

if find_spec("hypothesis") is not None:  # where other wheels are tested, only conformance runs
    from tests.tiers import register_profile

    register_profile()


def pytest_configure() -> None:
    """Set up what tests and the processes that they start inherit."""
    _allow_interrupts()
    _know_no_certificates()


def _allow_interrupts() -> None:
    """Let child processes be interrupted.

    A shell starts background jobs with SIGINT ignored, and ignored signals are inherited, so the
    tests that interrupt a process would depend on how pytest itself was started.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _know_no_certificates() -> None:
    """Let HTTP clients read no certificates: no test speaks TLS.

    Otherwise each client that a test makes reads all that the machine trusts, in up to 50 ms.
    """
    os.environ.pop("SSL_CERT_FILE", None)
    os.environ["SSL_CERT_DIR"] = tempfile.gettempdir()  # files of other names are not looked at
