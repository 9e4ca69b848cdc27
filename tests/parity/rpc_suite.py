"""Run torch's own RPC suite, from the installed wheel, against Rallypoint or against torch itself.

    python tests/parity/rpc_suite.py --against rallypoint
    python tests/parity/rpc_suite.py --against tensorpipe --group pure,rref --jobs 2
    python tests/parity/rpc_suite.py --against rallypoint --test RpcTest.test_add

Nothing of the suite is copied: ``rpc_groups`` reads which tests there are, ``rpc_zygote`` runs
them. A test that fails is run once more, alone and with twice the time; if it passes then, it
counts as passed and is marked flaky. Exits with 0 if all that ran passed, 1 if not, 3 if there was
nothing to run against.
"""

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parity.rpc_groups import COMPARED, GROUPS, NOT_APPLICABLE, Method, find_methods


ROOT: Final = Path(__file__).resolve().parents[2]
BASELINE: Final = ROOT / "bench" / "results" / "rpc_parity_tensorpipe.json"
NAMES: Final = {"rallypoint": "Rallypoint", "tensorpipe": "TensorPipe"}
UNAVAILABLE: Final = 3

_NOT_APPLICABLE = "not applicable"
_BAD = ("failed", "timeout")

Record = dict[str, Any]
"""One test's line of the report: group, result, seconds, and what else there is to say."""


class UnavailableError(Exception):
    """There is nothing to run, or nothing to run against."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    methods = find_methods()
    chosen = choose(methods, options.group, options.test)
    if options.list:
        for method in chosen:
            print(f"{method.group:18} {method.key}")
        return 0
    try:
        report = run(chosen, options)
    except UnavailableError as error:
        print(f"rpc_suite: {error}", file=sys.stderr)
        return UNAVAILABLE
    _summarise(report["tests"])
    if options.output:
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        beside = json.loads(BASELINE.read_text("utf-8")) if BASELINE.exists() else None
        Path(options.markdown).write_text(markdown(report, methods, beside), encoding="utf-8")
    return 1 if any(record["result"] in _BAD for record in report["tests"].values()) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", choices=sorted(NAMES), required=True)
    parser.add_argument(
        "--group",
        type=_groups,
        default=COMPARED,
        metavar="A,B",
        help=f"of {', '.join(GROUPS)}, or all (default: {','.join(COMPARED)})",
    )
    parser.add_argument(
        "--test", action="append", metavar="CLASS.test_x", help="one test of any group; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=2, help="tests at once (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds for a test (default: %(default)s)"
    )
    parser.add_argument("--no-rerun", action="store_true", help="run no failed test once more")
    parser.add_argument("--logs", metavar="FOLDER", help="keep what the ranks print, by test")
    parser.add_argument("--output", metavar="JSON", help="write all results there")
    parser.add_argument("--markdown", metavar="MD", help="write a table for readers there")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks of failures")
    parser.add_argument("--list", action="store_true", help="print the chosen tests, run nothing")
    return parser.parse_args(arguments)


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(GROUPS) if text == "all" else tuple(text.split(","))
    if unknown := [name for name in names if name not in GROUPS]:
        raise argparse.ArgumentTypeError(f"no group {unknown[0]!r} (known: {', '.join(GROUPS)})")
    return names


def choose(
    methods: Sequence[Method], groups: Sequence[str], keys: Sequence[str] | None
) -> list[Method]:
    """The methods with these keys, or else those of these groups, in the order of ``GROUPS``."""
    if keys is None:
        order = list(GROUPS)
        chosen = [method for method in methods if method.group in groups]
        return sorted(chosen, key=lambda method: order.index(method.group))
    by_key = {method.key: method for method in methods}
    if unknown := [key for key in keys if key not in by_key]:
        raise SystemExit(f"rpc_suite: the suite has no test {unknown[0]!r}; --list shows them all")
    return [by_key[key] for key in keys]


# --- running -------------------------------------------------------------------------------------


def run(chosen: Sequence[Method], options: argparse.Namespace) -> dict[str, Any]:
    """Run the chosen tests; the report is what ``--output`` writes."""
    if importlib.util.find_spec("expecttest") is None:
        raise UnavailableError("torch's test suite needs expecttest; pip install expecttest")
    ours = options.against == "rallypoint"
    left_out = {m.key: NOT_APPLICABLE[m.key] for m in chosen if ours and m.key in NOT_APPLICABLE}
    wanted = [method for method in chosen if method.key not in left_out]
    results: dict[str, Record] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="rpc-suite-") as temporary:
        folder = Path(options.logs or temporary).resolve()
        with _Progress(len(wanted)) as progress:
            # As upstream, no process has both: registering the faulty agent replaces an enum that
            # torch itself goes on using, and then no longer knows its own backend.
            of_agents = {
                agent: [method for method in wanted if method.agent == agent]
                for agent in ("tensorpipe", "faulty")
            }
            parts = {agent: part for agent, part in of_agents.items() if part}
            with _Zygote(options.against, parts, folder) as zygote:
                for part in parts.values():
                    versions = zygote.begin()
                    results.update(_run_part(zygote, part, options, progress))
                    zygote.end()
    return {
        "against": options.against,
        "versions": versions,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "settings": {"jobs": options.jobs, "timeout_s": options.timeout},
        "tests": {m.key: _record(m, results.get(m.key), left_out.get(m.key)) for m in chosen},
    }


def _run_part(
    zygote: "_Zygote",
    methods: Sequence[Method],
    options: argparse.Namespace,
    progress: "_Progress",
) -> dict[str, Record]:
    """Run each test once, and then those that failed once more, one after the other."""
    results: dict[str, Record] = {}
    keep, timeout = options.logs is not None, options.timeout
    for outcome in zygote.run(methods, jobs=options.jobs, timeout=timeout, keep=keep):
        results[outcome["key"]] = outcome
        progress.show(outcome, options.verbose)
    failed = [method for method in methods if results[method.key]["result"] in _BAD]
    again = [] if options.no_rerun else failed
    progress.more(len(again))
    for outcome in zygote.run(again, jobs=1, timeout=2 * timeout, keep=keep):
        if outcome["result"] not in _BAD:
            outcome["flaky"] = results[outcome["key"]]["error"]
            results[outcome["key"]] = outcome
        progress.show(outcome, options.verbose)
    return results


def _record(method: Method, outcome: Record | None, left_out: str | None) -> Record:
    if outcome is None:
        return {"group": method.group, "result": _NOT_APPLICABLE, "reason": left_out}
    record = {"group": method.group, "result": outcome["result"], "seconds": outcome["seconds"]}
    if outcome["result"] == "skipped":
        record["reason"] = outcome["error"]
    elif outcome["error"]:
        record["error"] = outcome["error"]
    if "flaky" in outcome:
        record["flaky"] = outcome["flaky"]
    if outcome["result"] == "passed" and any(outcome["exit_codes"]):
        record["exit_codes"] = outcome["exit_codes"]  # upstream looks at rank 0's alone
    return record


class _Zygote:
    """The process that runs the tests (``rpc_zygote``), and talks in lines of JSON."""

    def __init__(self, against: str, parts: Mapping[str, Sequence[Method]], folder: Path) -> None:
        orders = [
            {"agent": agent, "tests": [_order(method) for method in methods]}
            for agent, methods in parts.items()
        ]
        self._setup = {"against": against, "parts": orders}
        self._folder = folder

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        # A pool of threads does not survive a fork; four ranks have no use for one, either.
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._log = (self._folder / "zygote.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("rpc_zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **one},
        )
        try:
            self._send(self._setup)
        except BaseException:
            self.__exit__()
            raise
        return self

    def begin(self) -> dict[str, str]:
        """Wait until the next part is imported. Returns the versions."""
        ready = self._receive()
        if "unavailable" in ready:
            raise UnavailableError(ready["unavailable"])
        if ready["threads"] > 1:
            print(f"rpc_suite: forking with {ready['threads']} threads", file=sys.stderr)
        return dict(ready["versions"])

    def end(self) -> None:
        """Go on to the next part."""
        self._send({})

    def __exit__(self, *_error: object) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.kill()  # its own children die with it
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()

    def run(
        self, methods: Sequence[Method], *, jobs: int, timeout: float, keep: bool
    ) -> Iterator[Record]:
        orders = [_order(method) for method in methods]
        batch = {"tests": orders, "jobs": jobs, "timeout": timeout, "keep": keep}
        self._send({**batch, "folder": str(self._folder)})
        while "end" not in (message := self._receive()):
            if keep and message["details"]:
                text = self._folder / message["key"] / "failure.txt"
                text.write_text(message["details"], encoding="utf-8")
            yield message

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return dict(json.loads(line))
        code = self._process.wait()
        self._log.seek(0)
        said = self._log.read()[-4000:]
        raise RuntimeError(f"the process that runs the tests ended with {code}; it said:\n{said}")


def _order(method: Method) -> dict[str, str]:
    return {"key": method.key, "file": method.file, "cls": method.cls, "name": method.name}


# --- what is shown -------------------------------------------------------------------------------


class _Progress:
    """A bar where someone watches, a line per test elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._bar = total, 0, None
        if sys.stderr.isatty() and importlib.util.find_spec("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("importing torch and its suite", total=total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._bar:
            self._bar.stop()

    def more(self, count: int) -> None:
        self._total += count
        if self._bar:
            self._bar.update(self._task, total=self._total)

    def show(self, outcome: Record, verbose: bool) -> None:
        self._done += 1
        said: Callable[[str], None] = self._bar.console.out if self._bar else print
        bad = outcome["result"] in _BAD
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=outcome["key"])
        if bad or not self._bar:
            line = f"{outcome['result']:8} {outcome['key']} ({outcome['seconds']:.1f} s)"
            line += f"  again, alone: {outcome['flaky']}" if "flaky" in outcome else ""
            said(f"{self._done:4}/{self._total} {line}")
        if bad:
            said(f"          {outcome['error']}")
        if bad and verbose:
            said(outcome["details"])


def _summarise(tests: Mapping[str, Record]) -> None:
    counts = Counter(record["result"] for record in tests.values())
    flaky = sum("flaky" in record for record in tests.values())
    text = ", ".join(f"{number} {result}" for result, number in counts.most_common())
    print(f"{len(tests)} tests: {text}" + (f" ({flaky} of them flaky)" if flaky else ""))


def markdown(
    report: Mapping[str, Any], methods: Sequence[Method], beside: Mapping[str, Any] | None
) -> str:
    """The report as a table per group, with TensorPipe's own results beside it."""
    tests: Mapping[str, Record] = report["tests"]
    theirs: Mapping[str, Record] = beside["tests"] if beside else {}
    name = NAMES[report["against"]]
    versions = ", ".join(f"{what} {version}" for what, version in report["versions"].items())
    lines = [
        f"# torch's own RPC tests on {name}",
        "",
        f"Generated by `tests/parity/rpc_suite.py --against {report['against']}`"
        f" ({versions}; {report['machine']}). The tests come from the installed torch, unchanged.",
        "",
        f"| group | tests | {name} passes | fails | not applicable | TensorPipe passes |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    total: Counter[str] = Counter()
    for group in COMPARED:
        mine = [method for method in methods if method.group == group]
        count = _count(tests.get(method.key) for method in mine)
        count["theirs"] = _count(theirs.get(method.key) for method in mine)["passed"]
        count["tests"] = len(mine)
        total += count
        lines.append(_row(f"{group}: {GROUPS[group].title}", count))
    lines += [_row("**all of these**", total), ""]
    lines += _left_out(methods)
    lines += _list("Tests that fail", tests, _BAD, "error")
    lines += _list("Tests that do not apply", tests, (_NOT_APPLICABLE, "skipped"), "reason")
    flaky = {key: record for key, record in tests.items() if "flaky" in record}
    lines += _list("Tests that passed only when run alone", flaky, ("passed",), "flaky")
    return "\n".join(lines).rstrip() + "\n"


def _count(records: Iterator[Record | None]) -> Counter[str]:
    return Counter(record["result"] for record in records if record)


def _row(title: str, count: Mapping[str, int]) -> str:
    bad = sum(count[result] for result in _BAD)
    aside = count[_NOT_APPLICABLE] + count["skipped"]
    cells = (title, count["tests"], count["passed"], bad, aside, count["theirs"])
    return f"| {' | '.join(map(str, cells))} |"


def _left_out(methods: Sequence[Method]) -> list[str]:
    sizes = Counter(method.group for method in methods)
    rows = [
        f"| {name}: {group.title} | {sizes[name]} | {group.left_out} |"
        for name, group in GROUPS.items()
        if group.left_out
    ]
    head = ["## Groups that were not run", "", "| group | tests | why |", "|---|--:|---|"]
    return [*head, *rows, ""]


def _list(title: str, tests: Mapping[str, Record], results: Sequence[str], said: str) -> list[str]:
    rows = [
        f"| `{key}` | {record['result']} | {_cell(record.get(said))} |"
        for key, record in tests.items()
        if record["result"] in results
    ]
    return [f"## {title}", "", "| test | result | |", "|---|---|---|", *rows, ""] if rows else []


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(main())
