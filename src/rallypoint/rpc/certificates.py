"""A worker's TLS certificate, from files or generated, and the peers that it accepts."""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rallypoint._core import linux
from rallypoint.errors import ConfigError
from rallypoint.wire.tls import Identity, new_context, next_step, told


# Validity of generated certificates. They last as long as the process, and peers do not check the dates.
_FROM = dt.datetime(2000, 1, 1, tzinfo=dt.UTC)
_UNTIL = dt.datetime(9999, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Certificate and key of this worker, as PEM files. They are checked here, and loaded when the worker joins a group.

    Args:
        certificate: the worker's certificate, followed by intermediate certificates if there are any.
        key: its private key, not encrypted.
        authority: certificates of the authorities that sign workers' certificates, valid for servers and clients. Each
            end then rejects all other certificates. Host names are not checked, because jobs use addresses. None: any
            certificate is accepted from a worker that proves that it knows the group's secret.

    Raises:
        ConfigError: a file cannot be read, the key does not match the certificate, or the authority rejects the
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
    """Check the option.

    Raises:
        ConfigError: it is of another type, or needs a package that is not installed.
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
            "needs the package cryptography, which creates the certificate",
            "pip install cryptography, or give certificate files: rpc.Tls(certificate=..., key=...)",
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
                "tls.authority",
                str(tls.authority),
                f"is not a file of PEM certificates ({_why(error)})",
            ) from None
    try:
        return Identity.of(accepting, connecting)
    except ssl.SSLError as error:
        raise ConfigError(
            "tls.certificate",
            str(tls.certificate),
            f"is rejected by the authority {str(tls.authority)!r} ({told(error)})",
            next_step(
                told(error),
                "have that authority sign it, for servers and clients, or give the authority that signed it",
            ),
        ) from None


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    def ask() -> NoReturn:
        # Otherwise OpenSSL would prompt on the terminal.
        raise ConfigError(
            "tls.key",
            str(tls.key),
            "is encrypted, and workers cannot ask for its password: give an unencrypted key",
            "openssl pkey -in KEY -out PLAIN",
        )

    try:
        context.load_cert_chain(tls.certificate, tls.key, ask)
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                "tls.key",
                str(tls.key),
                f"does not match the certificate {str(tls.certificate)!r}",
                "give the private key of that certificate",
            ) from None
        raise ConfigError(
            "tls.certificate",
            str(tls.certificate),
            f"cannot be loaded together with the key {str(tls.key)!r} ({_why(error)})",
            "expected PEM files, which begin with -----BEGIN CERTIFICATE----- and -----BEGIN PRIVATE KEY-----",
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
    """Load a new self-signed certificate."""
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
    # Python's ssl reads only files; this one is in memory.
    fd = linux.memfd_create("rallypoint-certificate", linux.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
