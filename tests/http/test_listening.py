"""TLS, sockets of paths, and servers behind a proxy's path."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from onnxport.cli import build_parser
from onnxport.cli.serve import _hosts
from onnxport.errors import OnnxportError, RequestError
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.server import ServerOptions, serve
from onnxport.serving.http.sockets import bind, bound, unix_socket, url
from onnxport.serving.http.tls import TlsFiles

from .conftest import StartServer


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two certificates that signed themselves, and their keys."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes certificates, is not installed")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        _openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"),
        )
    locked = ("rsa", "-aes256", "-passout", "pass:sesame", "-in", folder / "one.key")
    _openssl(*locked, "-out", folder / "locked.key")
    both = (folder / "one.pem").read_text() + (folder / "one.key").read_text()
    (folder / "both.pem").write_text(both)
    (folder / "none.pem").write_text("no certificate")
    return folder


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def _trusting(path: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=path)


def test_https(tls: Path, start_server: StartServer) -> None:
    server = start_server(tls={"certfile": str(tls / "one.pem"), "keyfile": str(tls / "one.key")})
    assert server.url.startswith("https://127.0.0.1:")
    with httpx.Client(verify=_trusting(tls / "one.pem")) as client:
        assert client.get(f"{server.url}/health").json()["status"] == "ok"
    other = _trusting(tls / "two.pem")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/health", verify=other)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{server.url.replace('https', 'http')}/health")
    with httpx.Client(verify=_trusting(tls / "one.pem")) as client:
        client.get(f"{server.url}/health")
        code, out, err = server.stop()  # though a client keeps its connection
    assert (code, out) == (0, "closed\n")
    assert "Cancel" not in err


@pytest.mark.parametrize("needed", [1, 2])
def test_certificates_of_clients(tls: Path, start_server: StartServer, needed: int) -> None:
    files = {"certfile": tls / "both.pem", "ca_certs": tls / "two.pem"}
    given = {name: str(path) for name, path in files.items()}
    server = start_server(tls=given | {"cert_reqs": needed})
    trusting = _trusting(tls / "one.pem")
    with httpx.Client(verify=trusting) as client:
        if needed == 1:
            assert client.get(f"{server.url}/health").status_code == 200
        else:
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                client.get(f"{server.url}/health")
    trusting = _trusting(tls / "one.pem")
    trusting.load_cert_chain(tls / "two.pem", tls / "two.key")
    with httpx.Client(verify=trusting) as client:
        assert client.get(f"{server.url}/health").status_code == 200


def test_a_key_has_a_password(tls: Path) -> None:
    TlsFiles(tls / "one.pem", tls / "locked.key", "sesame").context()
    TlsFiles(tls / "one.pem", tls / "one.key", "of nothing").context()
    for password, reason in ((None, "no password was given"), ("simsim", "cannot be used")):
        with pytest.raises(OnnxportError, match=reason) as caught:
            TlsFiles(tls / "one.pem", tls / "locked.key", password).context()
        assert "--ssl-keyfile-password" in str(caught.value)
    assert "sesame" not in repr(TlsFiles(tls / "one.pem", password="sesame"))


@pytest.mark.parametrize(
    ("certfile", "keyfile", "ca_certs", "reason"),
    [
        ("gone.pem", "one.key", None, r"--ssl-certfile .*gone\.pem cannot be read: No such file"),
        ("one.pem", "gone.key", None, r"--ssl-keyfile .*gone\.key cannot be read: No such file"),
        ("one.pem", ".", None, "cannot be read: Is a directory"),
        ("one.pem", "two.key", None, "key values mismatch"),
        ("none.pem", "one.key", None, r"the certificate in .*none\.pem and the key in .*one\.key"),
        ("one.pem", None, None, r"the key in .*one\.pem cannot be used"),
        ("one.pem", "one.key", "gone.pem", r"--ssl-ca-certs .*gone\.pem cannot be read"),
        ("one.pem", "one.key", "none.pem", r"--ssl-ca-certs .*none\.pem has no certificates"),
    ],
)
def test_files_that_cannot_be_used(
    tls: Path, certfile: str, keyfile: str | None, ca_certs: str | None, reason: str
) -> None:
    files = TlsFiles(
        tls / certfile,
        keyfile and tls / keyfile,
        ca_certs=ca_certs and tls / ca_certs,
        cert_reqs=0 if ca_certs is None else 2,
    )
    with pytest.raises(OnnxportError, match=reason):
        files.context()


def test_options_that_would_do_nothing() -> None:
    assert TlsFiles.of(None, None, None, None, 0) is None
    one = Path("one.pem")
    assert TlsFiles.of(one, None, None, one, 2) == TlsFiles(one, ca_certs=one, cert_reqs=2)
    with pytest.raises(RequestError, match="--ssl-keyfile and --ssl-ca-certs without"):
        TlsFiles.of(None, one, None, one, 0)
    with pytest.raises(RequestError, match="--ssl-keyfile-password and --ssl-cert-reqs without"):
        TlsFiles.of(None, None, "x", None, 1)
    for ca_certs, cert_reqs in ((one, 0), (None, 2)):
        with pytest.raises(RequestError, match=f"--ssl-cert-reqs is {cert_reqs} and"):
            TlsFiles.of(one, None, None, ca_certs, cert_reqs)


def test_a_socket_of_a_path(tmp_path: Path, start_server: StartServer) -> None:
    path = tmp_path / "server.sock"
    server = start_server(uds=str(path), access_log=True)
    assert server.url == f"unix:{path}"
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        assert client.get("http://any/health").json()["status"] == "ok"
    with (
        pytest.raises(OnnxportError, match="another server listens there"),
        unix_socket(str(path)),
    ):
        pass
    code, out, err = server.stop()
    assert (code, out) == (0, "closed\n")
    assert '"GET /health" 200' in err
    assert not path.exists()


@pytest.fixture
def another() -> str:
    """Return a second address of this machine."""
    address = "127.0.0.2"
    try:
        bind(address, 0).close()
    except OnnxportError:
        pytest.skip("this system has one address for itself alone")
    return address


def test_several_addresses(start_server: StartServer, another: str) -> None:
    server = start_server(hosts=["127.0.0.1", another])
    for address in (server.url, server.url.replace("127.0.0.1", another)):
        assert httpx.get(f"{address}/health").json()["status"] == "ok"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url.replace('127.0.0.1', '127.0.0.3')}/health")
    assert server.stop()[:2] == (0, "closed\n")


def test_all_addresses_of_both_kinds_have_a_socket_each() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    for hosts in (["0.0.0.0", "::"], ["::", "0.0.0.0"]):
        with bound(hosts, 0) as sockets:
            for sock in sockets:
                sock.listen()
            assert len({sock.getsockname()[1] for sock in sockets}) == 1


def test_one_of_several_addresses_is_taken(another: str) -> None:
    async def nothing() -> None: ...

    with bound(["127.0.0.1"], 0) as [other]:
        port = other.getsockname()[1]
        with bound([another, "127.0.0.1"], port) as sockets:
            other.listen()
            with pytest.raises(OnnxportError, match=f"cannot listen on 127.0.0.1 port {port}"):
                serve(nothing, sockets, nothing, lambda: None, ServerOptions())  # type: ignore[arg-type]
    with (
        pytest.raises(OnnxportError, match=r"cannot listen on 203\.0\.113\.1 port \d+"),
        bound(["127.0.0.1", "203.0.113.1"], 0),
    ):
        pass


@pytest.mark.parametrize("text", [",", "127.0.0.1,", "::1,127.0.0.1, ::1"])
def test_addresses_that_are_none(text: str) -> None:
    options = build_parser().parse_args(["serve", "m", "--host", text])
    with pytest.raises(RequestError, match="empty or there twice"):
        _hosts(options)


def test_what_is_at_a_path_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "server.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with unix_socket(str(path)) as [sock]:
        assert url("", sock, is_tls=True) == f"unix:{path} (TLS)"
        path.unlink()
        path.write_text("another's")
    assert path.exists()
    with pytest.raises(OnnxportError, match="a file that is no socket"), unix_socket(str(path)):
        pass
    for bad in (tmp_path / "gone" / "server.sock", tmp_path / ("x" * 120), "a\0b", "\0a", ""):
        with pytest.raises(OnnxportError, match="--uds"), unix_socket(str(bad)):
            pass
    assert [one.name for one in tmp_path.iterdir()] == ["server.sock"]


def test_under_the_path_of_a_proxy(start_server: StartServer) -> None:
    server = start_server(root_path="/llm", api_keys=["sesame"])
    for path in ("/health", "/llm/health"):
        assert httpx.get(server.url + path).status_code == 200
    for path in ("/v1/models", "/llm/v1/models", "/llm/tokenize"):
        assert httpx.get(server.url + path).status_code == 401, path
    headers = {"Authorization": "Bearer sesame"}
    for path in ("/v1/models", "/llm/v1/models"):
        assert httpx.get(server.url + path, headers=headers).status_code == 200
    assert httpx.get(f"{server.url}/llm/llm/v1/models", headers=headers).status_code == 404
    for root in ("", "/llm"):
        path = f"{server.url}{root}/v1/messages"
        wrong = httpx.post(path, headers={"x-api-key": "sesame"}, json={})
        assert (wrong.status_code, wrong.json()["type"]) == (400, "error"), root
        assert wrong.headers["request-id"] == wrong.headers["x-request-id"]
        assert httpx.get(path).json()["error"]["type"] == "authentication_error"
    assert "Warning" not in server.stop()[2]


@pytest.mark.parametrize(
    "path",
    ["llm", "/llm/", "/", "/a//b", "/a b", "/a?b", "/v1", "/v1/messages", "/chat", "/responses"],
)
def test_a_path_that_is_none(path: str) -> None:
    with pytest.raises(RequestError, match="root_path is"):
        AppOptions(root_path=path)


def test_two_names_of_one_address_are_refused() -> None:
    with (
        pytest.raises(OnnxportError, match="the same address"),
        bound(["localhost", "127.0.0.1"], 0),
    ):
        pass
