"""What a worker shows the others, and whom it takes: its own files, or a certificate made on the spot."""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rallypoint.errors import ConfigError
from rallypoint.wire.tls import Identity, new_context, told


# Of a certificate that lives as long as its process: nobody looks at them, and no clock is asked.
_FROM = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_UNTIL = dt.datetime(9999, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificate and key of this worker, as PEM files. They are looked at here, and read when the group is joined.

    Args:
        certificate: the worker's, and after it those up to the authority's, if there are any between.
        key: its private key, not encrypted.
        authority: certificates of those who may have signed a worker's: each end then takes nobody else's. They must
            be good for both sides of a connection. Host names are not looked at, since jobs use addresses. None: a
            certificate is taken from whoever proves that he knows the secret.

    Raises:
        ConfigError: a file cannot be read, the two do not belong together, or the authority does not take this very
            certificate.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authority: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):
            path = getattr(self, name)
            if path is not None:
                _check_file(f"tls.{name}", path)
        identity_of(self)


def check_tls(tls: bool | Tls | None) -> bool | Tls:
    """The option, or why it cannot be had.

    Raises:
        ConfigError: it is something else, or needs a package that is not there.
    """
    if isinstance(tls, Tls):
        return tls
    if tls is not None and not isinstance(tls, bool):
        raise ConfigError(
            "tls", tls, "expected True, False or rpc.Tls(certificate=..., key=..., authority=...)"
        )
    if tls and importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "tls",
            True,
            "needs the package cryptography, to make a certificate",
            "pip install 'rallypoint[tls]', or give files: rpc.Tls(certificate=..., key=...)",
        )
    return bool(tls)


def identity_of(tls: bool | Tls) -> Identity | None:
    """The contexts of a worker with this option; None without TLS.

    Raises:
        ConfigError: as :class:`Tls`.
    """
    if not tls:
        return None
    accepting, connecting = new_context(accepts=True), new_context(accepts=False)
    if tls is True:
        _load_own(accepting)
        return Identity.of(accepting, connecting)
    _load(accepting, tls)
    if tls.authority is None:
        return Identity.of(accepting, connecting)
    _load(connecting, tls)
    for context in (accepting, connecting):
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cafile=tls.authority)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                "tls.authority", str(tls.authority), f"holds no certificates in PEM ({_why(error)})"
            ) from None
    try:
        return Identity.of(accepting, connecting)
    except ssl.SSLError as error:
        raise ConfigError(
            "tls.certificate",
            str(tls.certificate),
            f"is not taken by the authority {str(tls.authority)!r} ({told(error)})",
            "have it signed by that authority, for servers and clients, or give the one that has signed it",
        ) from None


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    def ask() -> NoReturn:
        # Else OpenSSL would ask at the terminal.
        raise ConfigError(
            "tls.key",
            str(tls.key),
            "is encrypted, and nobody is there to be asked for its password",
            "openssl pkey -in KEY -out PLAIN",
        )

    try:
        context.load_cert_chain(tls.certificate, tls.key, ask)
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                "tls.key",
                str(tls.key),
                f"does not belong to the certificate {str(tls.certificate)!r}",
                "give the key that the certificate was made for",
            ) from None
        raise ConfigError(
            "tls.certificate",
            str(tls.certificate),
            f"it and the key {str(tls.key)!r} cannot be read as PEM ({_why(error)})",
            "give files that begin with -----BEGIN CERTIFICATE----- and -----BEGIN PRIVATE KEY-----",
        ) from None


def _check_file(field: str, path: str | os.PathLike[str]) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise ConfigError(
            field, os.fspath(path), f"cannot be read: {_why(error)}", "give the path of a PEM file"
        ) from None


def _why(error: OSError) -> str:
    return told(error) if isinstance(error, ssl.SSLError) else error.strerror or str(error)


def _load_own(context: ssl.SSLContext) -> None:
    """A certificate that this process has made and signed itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rallypoint worker")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + made.public_bytes(serialization.Encoding.PEM)
    # Python's ssl reads files only; this one lies in memory.
    fd = os.memfd_create("rallypoint-certificate", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
