"""Both ends of a TLS connection, and certificates, for tests."""

from __future__ import annotations

import datetime as dt
import functools
import socket
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rallypoint.rpc.certificates import identity_of
from rallypoint.wire.tls import Identity, TlsSocket


@functools.cache
def an_identity() -> Identity:
    """A freshly made identity."""
    made = identity_of(True)
    assert made is not None
    return made


def shake(*ends: TlsSocket) -> None:
    """Do both handshakes on one thread."""
    for each in ends:
        each.setblocking(False)
    while not all(each.is_open for each in ends):
        for each in ends:
            try:
                each.step()
            except BlockingIOError:
                pass


def pair(
    a: socket.socket | None = None, b: socket.socket | None = None
) -> tuple[TlsSocket, TlsSocket]:
    """Two connected ends; the second one has accepted."""
    if a is None or b is None:
        a, b = socket.socketpair()
    ends = TlsSocket(a, an_identity(), accepts=False), TlsSocket(b, an_identity(), accepts=True)
    shake(*ends)
    return ends


class Authority:
    """A certificate authority; it writes what it signs to files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self._made = _sign(self._key, self._name, self._key, self._name, is_authority=True)
        self.path = self._write("authority", self._made)

    def sign(self, name: str, *, until: int = 9999) -> dict[str, str]:
        """Paths of certificate, key and authority, as ``rpc.Tls`` takes them."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _sign(key, _name(name), self._key, self._name, until=until)
        hidden = self._folder / f"{name}.key"
        hidden.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return {"certificate": self._write(name, made), "key": str(hidden), "authority": self.path}

    def _write(self, name: str, made: x509.Certificate) -> str:
        path = self._folder / f"{name}.pem"
        path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        return str(path)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _sign(
    key: Any,
    name: x509.Name,
    by: Any,
    issuer: x509.Name,
    *,
    is_authority: bool = False,
    until: int = 9999,
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(2000, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(dt.datetime(until, 1, 1, tzinfo=dt.UTC))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(by, hashes.SHA256())
    )
