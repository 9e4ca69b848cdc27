"""Real etcd servers for tests: one member or several, optionally with TLS and users.

Data, certificates and logs are in the given folder; members are killed by their own pid.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from ports import free_port


ROOT_PASSWORD = "root-word"


def require_etcd() -> None:
    """Skip where there is no etcd; in CI, fail instead."""
    if shutil.which("etcd") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("etcd is not on PATH, and CI=true: .ci/run installs it")
        pytest.skip("etcd is not on PATH (Debian: apt-get install etcd-server)")


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)


@dataclass
class Member:
    command: list[str]
    log: Path
    port: int
    popen: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"


@dataclass
class Certificates:
    """An authority, what it signed for the servers and for a client, and an untrusted authority."""

    folder: Path

    def __post_init__(self) -> None:
        for authority in ("ca", "stranger"):
            self._openssl(
                f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={authority}"
                f" -keyout {authority}.key -out {authority}.pem"
            )
        (self.folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        for name, authority in (("server", "ca"), ("client", "ca"), ("intruder", "stranger")):
            self._openssl(
                f"req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={name}"
                f" -keyout {name}.key -out {name}.csr"
            )
            self._openssl(
                f"x509 -req -in {name}.csr -CA {authority}.pem -CAkey {authority}.key -CAcreateserial"
                f" -days 2 -extfile names -out {name}.pem"
            )

    def _openssl(self, words: str) -> None:
        subprocess.run(
            ["openssl", *words.split()], cwd=self.folder, check=True, capture_output=True
        )

    def path(self, name: str) -> str:
        return str(self.folder / name)


class EtcdCluster:
    """Starts ``size`` members and waits until each is healthy.

    Args:
        folder: an empty one.
        certificates: serve over TLS, and ask clients for a certificate.
        flags: further flags for etcd.
    """

    def __init__(
        self,
        folder: Path,
        size: int = 1,
        certificates: Certificates | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.certificates = certificates
        scheme = "http" if certificates is None else "https"
        ports = free_ports(2 * size)
        peers = [f"http://127.0.0.1:{port}" for port in ports[size:]]
        everyone = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
        tls: list[str] = []
        if certificates is not None:
            server, key, ca = map(certificates.path, ("server.pem", "server.key", "ca.pem"))
            tls = ["--cert-file", server, "--key-file", key]
            tls += ["--client-cert-auth", "--trusted-ca-file", ca]
        self.members: list[Member] = []
        for i, peer in enumerate(peers):
            client = f"{scheme}://127.0.0.1:{ports[i]}"
            command = ["etcd", "--name", f"m{i}", "--data-dir", str(folder / f"m{i}")]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", everyone, "--heartbeat-interval", "50"]
            command += ["--election-timeout", "500", "--logger", "zap", *tls, *flags]
            self.members.append(Member(command, folder / f"m{i}.log", ports[i]))
        try:
            for member in self.members:
                self.start(member)
            for member in self.members:
                self.wait_healthy(member)
        except BaseException:
            self.stop()
            raise

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def start(self, member: Member) -> None:
        # etcd would take variables named ETCD_… for settings.
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with member.log.open("ab") as log:
            member.popen = subprocess.Popen(member.command, stdout=log, stderr=log, env=env)

    def wait_healthy(self, member: Member, timeout: float = 20.0) -> None:
        end = time.monotonic() + timeout
        while True:
            try:
                if json.loads(self.request(member, "health"))["health"] == "true":
                    return
            except (OSError, ValueError):
                pass  # not up yet
            assert member.popen is not None
            try:  # a server that exits before it is healthy is noticed at once
                member.popen.wait(0.05)
            except subprocess.TimeoutExpired:
                if time.monotonic() < end:
                    continue
            raise AssertionError(f"etcd is not healthy:\n{member.log.read_text()[-2000:]}")

    def request(self, member: Member, path: str, body: object = None, token: str = "") -> bytes:
        """One plain request, not through the code under test."""
        certificates, context, scheme = self.certificates, None, "http"
        if certificates is not None:
            scheme = "https"
            context = ssl.create_default_context(cafile=certificates.path("ca.pem"))
            context.load_cert_chain(
                certificates.path("client.pem"), certificates.path("client.key")
            )
        request = urllib.request.Request(
            f"{scheme}://{member.endpoint}/{path}",
            None if body is None else json.dumps(body).encode(),
            {"Authorization": token} if token else {},
        )
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
            return answer.read()

    def keys(self, prefix: str) -> list[str]:
        """Every key that etcd itself holds under the prefix."""
        return [base64.b64decode(one["key"]).decode() for one in self._entries(prefix)]

    def seconds_to_live(self, prefix: str) -> set[int]:
        """The granted lifetimes of the keys under the prefix; 0 means forever."""
        granted = set()
        for one in self._entries(prefix):
            lease = one.get("lease", "0")
            body = {"ID": lease}
            answer = (
                self.request(self._alive(), "v3/lease/timetolive", body) if int(lease) else b"{}"
            )
            granted.add(int(json.loads(answer).get("grantedTTL", 0)))
        return granted

    def _alive(self) -> Member:
        return next(member for member in self.members if member.popen is not None)

    def _entries(self, prefix: str) -> list[dict[str, str]]:
        start = prefix.encode()
        body = {
            "key": base64.b64encode(start).decode(),
            "range_end": base64.b64encode(start[:-1] + bytes([start[-1] + 1])).decode(),
            "keys_only": True,
        }
        found: list[dict[str, str]] = json.loads(
            self.request(self._alive(), "v3/kv/range", body)
        ).get("kvs", [])
        return found

    def leader(self) -> Member:
        """The cluster's leader."""
        for member in self.members:
            if member.popen is None:
                continue
            status = json.loads(self.request(member, "v3/maintenance/status", {}))
            if status["leader"] == status["header"]["member_id"]:
                return member
        raise AssertionError("no leader")

    def enable_users(self, user: str, password: str, prefix: str) -> None:
        """Require users from now on: root, and one who may use only the keys under ``prefix``."""
        member, start = self.members[0], prefix.encode()
        permission = {
            "permType": "READWRITE",
            "key": base64.b64encode(start).decode(),
            "range_end": base64.b64encode(start[:-1] + bytes([start[-1] + 1])).decode(),
        }
        for path, body in (
            ("user/add", {"name": "root", "password": ROOT_PASSWORD}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": user, "password": password}),
            ("role/add", {"name": "job"}),
            ("role/grant", {"name": "job", "perm": permission}),
            ("user/grant", {"user": user, "role": "job"}),
            ("enable", {}),
        ):
            self.request(member, f"v3/auth/{path}", body)

    def kill(self, member: Member) -> None:
        """Kill it without a goodbye, as when its host is lost."""
        assert member.popen is not None
        os.kill(member.popen.pid, signal.SIGKILL)
        member.popen.wait()
        member.popen = None

    def stop(self) -> None:
        for member in self.members:
            if member.popen is not None:
                self.kill(member)
