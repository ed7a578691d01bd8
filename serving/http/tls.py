"""TLS: which files a server has for it, and whether they can be used."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from onnxport.errors import OnnxportError, RequestError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a server shows its clients, and what it asks of them.

    Attributes:
        certfile: PEM with the certificate, and those between it and the authority behind it.
        keyfile: PEM with its private key; None: it is in `certfile`.
        password: of the key; None: it has none.
        ca_certs: PEM with the authorities that certificates of clients are of.
        cert_reqs: whether clients have to show one, by the numbers of `ssl.VerifyMode`.
    """

    certfile: Path
    keyfile: Path | None = None
    password: str | None = field(default=None, repr=False)
    ca_certs: Path | None = None
    cert_reqs: int = ssl.CERT_NONE

    @classmethod
    def of(
        cls,
        certfile: Path | None,
        keyfile: Path | None,
        password: str | None,
        ca_certs: Path | None,
        cert_reqs: int,
    ) -> TlsFiles | None:
        """Return the files of a server's options; None: it is to have no TLS.

        Raises:
            RequestError: options were given that do nothing without another one.
        """
        given = {
            "--ssl-keyfile": keyfile is not None,
            "--ssl-keyfile-password": password is not None,
            "--ssl-ca-certs": ca_certs is not None,
            "--ssl-cert-reqs": cert_reqs != ssl.CERT_NONE,
        }
        if certfile is None:
            if named := [name for name, is_given in given.items() if is_given]:
                raise RequestError(
                    f"{' and '.join(named)} without --ssl-certfile: the server would have no TLS; "
                    "give the certificate, too"
                )
            return None
        if (ca_certs is None) != (cert_reqs == ssl.CERT_NONE):
            raise RequestError(
                f"--ssl-cert-reqs is {cert_reqs} and --ssl-ca-certs is {ca_certs}: clients are "
                "asked for certificates by both together; give --ssl-cert-reqs 1 (they may show "
                "one) or 2 (they must) and the authorities' file, or neither"
            )
        return cls(certfile, keyfile, password, ca_certs, cert_reqs)

    def context(self) -> ssl.SSLContext:
        """Return what connections are made with.

        Raises:
            OnnxportError: a file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        named = (("--ssl-certfile", self.certfile), ("--ssl-keyfile", self.keyfile))
        for name, path in (*named, ("--ssl-ca-certs", self.ca_certs)):
            if path is not None:
                _check_readable(name, path)
        try:
            context.load_cert_chain(self.certfile, self.keyfile, self._password)
        except (ssl.SSLError, ValueError) as error:
            key = self.certfile if self.keyfile is None else self.keyfile
            raise OnnxportError(
                f"the certificate in {self.certfile} and the key in {key} cannot be used: "
                f"{_reason(error)}. Give PEM files that belong together as --ssl-certfile and "
                "--ssl-keyfile, and the key's password, if it has one, as --ssl-keyfile-password."
            ) from error
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError as error:
                raise OnnxportError(
                    f"--ssl-ca-certs {self.ca_certs} has no certificates that can be read "
                    f"({_reason(error)}); give a PEM file of them"
                ) from error
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)
        return context

    def _password(self) -> str:
        """Return the key's password; OpenSSL would ask the terminal for one that is not there."""
        if self.password is None:
            raise ValueError("the key is encrypted, and no password was given")
        return self.password


def _check_readable(name: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise OnnxportError(
            f"{name} {path} cannot be read: {error.strerror}; correct the path"
        ) from error


def _reason(error: Exception) -> str:
    """Return why, in OpenSSL's words; of a wrong password it has few."""
    found = getattr(error, "reason", None)
    return str(found).replace("_", " ").lower() if found else str(error)
