"""What every test relies on."""

import signal


def pytest_configure() -> None:
    """Let child processes be interrupted.

    A shell starts background jobs with SIGINT ignored, and ignored signals are inherited, so the
    tests that interrupt a process would depend on how pytest itself was started.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
