"""The sockets that a server listens on: an address with a port, or a path of this machine."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from onnxport.errors import OnnxportError


@contextmanager
def bound(hosts: Sequence[str], port: int) -> Iterator[list[socket.socket]]:
    """Give bound sockets that do not listen yet, one of each host, all with the same port.

    Raises:
        OnnxportError: an address cannot be used, or two are the same.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for host in hosts:
            sock = stack.enter_context(bind(host, port, ipv6_alone=len(hosts) > 1))
            port = sock.getsockname()[1]  # which may have been any
            # Both could be bound, and the second one not listen.
            for other, known in zip(hosts, sockets, strict=False):
                if known.getsockname() == sock.getsockname():
                    raise OnnxportError(
                        f"--host names {other} and {host}, the same address; leave one out"
                    )
            sockets.append(sock)
        yield sockets


def bind(host: str, port: int, *, ipv6_alone: bool = False) -> socket.socket:
    """Return a bound socket that does not listen yet; port 0 takes a free one.

    Args:
        host: a name or an address.
        port: of it.
        ipv6_alone: whether all addresses of IPv6 are none of IPv4, which has a socket of its own.

    Raises:
        OnnxportError: the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # Of a name that has both, as localhost does, most clients can reach that of IPv4.
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        with ExitStack() as stack:  # which closes what could not be bound
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if ipv6_alone and family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            stack.pop_all()
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    except UnicodeError as error:  # of names of hosts, which have parts of 63 characters
        raise OnnxportError(f"{host!r} is no name of a host ({error}); correct --host") from error
    return sock


def cannot_listen(host: str, port: int, error: OSError) -> OnnxportError:
    """Return what an error says of an address."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return OnnxportError(
            f"cannot listen on {host} port {port}: {error.strerror}. Choose a --host that this "
            "machine has, or 0.0.0.0 for all it has."
        )
    return OnnxportError(
        f"cannot listen on {host} port {port}: {error.strerror}. Choose another --port, or "
        "--port 0 for a free one."
    )


@contextmanager
def unix_socket(path: str) -> Iterator[list[socket.socket]]:
    """Give a list of one socket, bound to a path, which does not listen yet.

    The path is removed behind.

    A socket that a server has left behind, on which nobody listens, is replaced.

    Raises:
        OnnxportError: the path cannot be used.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise OnnxportError("this system has no sockets of files; leave --uds out")
    if "\0" in path:  # the system would bind what is before it, and nothing would remove that
        raise OnnxportError(f"--uds is {path!r}, and a path has no NUL; choose another")
    _remove_left(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with sock:
        try:
            sock.bind(path)
            own = os.stat(path)
        except (OSError, ValueError) as error:
            raise OnnxportError(
                f"cannot listen on {path}: {getattr(error, 'strerror', None) or error}. Choose "
                "another --uds: a short path in a folder that is there and may be written."
            ) from error
        try:
            yield [sock]
        finally:
            with suppress(FileNotFoundError):
                now = os.stat(path)
                if (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino):
                    os.unlink(path)


def _remove_left(path: str) -> None:
    """Remove a socket on which nobody listens.

    Raises:
        OnnxportError: something else is there, or somebody listens.
    """
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return  # binding tells why, if it matters
    if not stat.S_ISSOCK(mode):
        raise OnnxportError(
            f"cannot listen on {path}: there is a file that is no socket. Choose another --uds, or "
            "remove it."
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with suppress(OSError):
                os.unlink(path)
            return
        except OSError:
            pass  # it is full, or not ours: somebody's
    raise OnnxportError(
        f"cannot listen on {path}: another server listens there. Choose another --uds, or stop it."
    )


def url(host: str, sock: socket.socket, *, is_tls: bool = False) -> str:
    """Return the address of a bound socket, as a client writes it; of a path, `unix:PATH`."""
    address = sock.getsockname()
    if isinstance(address, str):
        return f"unix:{address}{' (TLS)' if is_tls else ''}"
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{address[1]}"
