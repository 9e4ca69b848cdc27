"""``rally web``: a page about the jobs on this host.

It is served on the loopback interface only. The printed address holds a token, which the browser receives as a cookie; without
it, no request is answered. Requests with another host name are refused, so that no page elsewhere can reach this server
through a name that resolves to it (DNS rebinding).
"""

from __future__ import annotations

import hmac
import json
import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rallypoint.control import client
from rallypoint.control.stacks import stack_groups
from rallypoint.control.tables import worker_table
from rallypoint.errors import ConfigError, ControlError

from . import page_state


HELP = """\
usage: rally web [JOB] [--port PORT]

Serve a page about this user's jobs on this host: generations, ranks coloured by what they do, stacks, failure reports.
Open the address that is printed: it contains a token, without which nothing is shown. From another machine, forward the
port: ssh -L 8080:localhost:8080 HOST

  JOB          its id, or the start of it, or the supervisor's pid (see rally ps); the page lists the others
  --port PORT  default: any free one

Ctrl-C ends it."""

# A report is a few KB.
LONGEST_REPORT = 256 << 10


def command(words: Sequence[str], show: Callable[[str], None]) -> int:
    """Run ``rally web`` until it is interrupted; returns the exit code.

    Raises:
        ConfigError: a flag is wrong, or the port is in use.
        ControlError: there is no such job.
    """
    if {"-h", "--help"} & set(words):
        show(HELP)
        return 0
    job, port = _parse(words)
    query = f"&job={client.connect(job).pid}" if job else ""
    try:
        server = WebServer(port)
    except OSError as error:
        raise ConfigError(
            "--port", str(port), error.strerror or str(error), "leave it out for a free one"
        ) from None
    show(f"http://127.0.0.1:{server.server_port}/?token={server.token}{query}")
    ended = threading.Event()

    def end(_number: int, _frame: object) -> None:
        # shutdown() waits for the loop, which this handler may have interrupted.
        if not ended.is_set():
            ended.set()
            threading.Thread(target=server.shutdown, daemon=True).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with server:
        server.serve_forever()
    return 0


def _parse(words: Sequence[str]) -> tuple[str, int]:
    names: list[str] = []
    port = 0
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, has_value, value = word.partition("=")
        if flag == "--port":
            value = value if has_value else rest.pop(0) if rest else ""
            if not (value.isascii() and value.isdigit() and int(value) < 65536):
                raise ConfigError("--port", value, "expected 0 to 65535")
            port = int(value)
        elif word.startswith("-"):
            raise ConfigError("web", word, "no such flag (known: --port)", "rally web --help")
        else:
            names.append(word)
    if len(names) > 1:
        raise ConfigError("web", " ".join(names), "expected one job", "rally web --help")
    return (names[0] if names else ""), port


class WebServer(ThreadingHTTPServer):
    """Serves the page and the data that it requests.

    Args:
        port: the port to listen on; 0: any free one.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.token = secrets.token_urlsafe(24)
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost")}
        self.page = files(__package__ or "").joinpath("page.html").read_text(encoding="utf-8")
        self._lock = threading.Lock()
        self._usage: dict[int, list[dict[str, Any]]] = {}
        self._seen: dict[int, dict[str, Any]] = {}  # the last status of each job

    def state(self, wanted: str) -> dict[str, Any]:
        """What the page shows about the wanted job; if that is empty, about the first one."""
        found = [(job, told) for job, told in client.running() if isinstance(told, dict)]
        jobs = [{"id": told["id"], "pid": job.pid} for job, told in found]
        told = next((told for job, told in found if str(job.pid) == wanted), None)
        if told is None and not wanted and found:
            told = found[0][1]
        if told is None:
            with self._lock:
                seen = self._seen.get(int(wanted)) if wanted.isdigit() else None
            problem = "the job has ended" if seen is not None else "no job runs"
            return {
                "jobs": jobs,
                "status": seen,
                "cells": [],
                "problem": problem,
                "report": _report(seen),
            }
        cells, problem = [], ""
        try:
            cells = self._cells(told)
        except ControlError as error:
            problem = str(error)
        with self._lock:
            self._seen[told["pid"]] = told
        return {"jobs": jobs, "status": told, "cells": cells, "problem": problem, "report": ""}

    def _cells(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        pid = told["pid"]
        now = client.connect(str(pid)).usage()
        with self._lock:
            before, self._usage[pid] = self._usage.get(pid, []), now
        return page_state.cells(told, worker_table.rows(now, before))


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    server_version, sys_version = "rally", ""

    def do_GET(self) -> None:
        """Answer a request, or refuse it."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if self.headers.get("Host", "") not in self.server.hosts:
            self._answer(403, "text/plain", "expected 127.0.0.1 or localhost as the host name")
        elif parts.path == "/" and self._is_token(query.get("token", "")):
            # Redirect to an address without the token: addresses get copied and kept in histories.
            job = query.get("job", "")
            self.send_response(303)
            self.send_header("Location", f"/?job={job}" if job.isdigit() else "/")
            cookie = f"{self._cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            self.send_header("Set-Cookie", cookie)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif not self._is_token(self._token_of_cookie()):
            self._answer(403, "text/plain", "open the address that `rally web` has printed")
        else:
            self._serve(parts.path, query.get("job", ""))

    def _serve(self, path: str, job: str) -> None:
        first, _, rank = path[1:].partition("/")
        try:
            if first == "":
                nonce = secrets.token_urlsafe(16)
                self._answer(200, "text/html", self.server.page.replace("NONCE", nonce), nonce)
            elif first == "state":
                self._answer(200, "application/json", json.dumps(self.server.state(job)))
            elif first == "stacks" and (not rank or rank.isdigit()):
                processes = client.connect(job).stacks([int(rank)] if rank else [])
                text = stack_groups.text(processes, all_threads=bool(rank)) or "no worker runs now"
                self._answer(200, "application/json", json.dumps({"text": text}))
            else:
                self._answer(404, "text/plain", "no such page")
        except ControlError as error:
            self._answer(502, "text/plain", str(error))

    @property
    def _cookie(self) -> str:
        return f"rally{self.server.server_port}"  # all ports of a host share its cookies

    def _token_of_cookie(self) -> str:
        # Not with http.cookies, which drops all cookies if it cannot parse one, such as another program's on this host.
        for each in self.headers.get("Cookie", "").split(";"):
            name, _, value = each.strip().partition("=")
            if name == self._cookie:
                return value
        return ""

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.server.token.encode())

    def _answer(self, code: int, kind: str, text: str, nonce: str = "") -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        own = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; " if nonce else ""
        policy = f"default-src 'none'; {own}connect-src 'self'; frame-ancestors 'none'"
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Log nothing: addresses may hold the token."""


def _report(status: dict[str, Any] | None) -> str:
    """The report of a job that has failed; empty if there is none."""
    if status is None or not status["log_folder"]:
        return ""
    try:
        with Path(status["log_folder"], "report.json").open(encoding="utf-8") as file:
            return file.read(LONGEST_REPORT)
    except OSError:
        return ""
