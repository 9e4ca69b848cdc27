"""The report as a person reads it: short, in its columns, and safe to print whatever workers said."""

from __future__ import annotations

import re
import signal
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.launch.output.failure import Raised, WorkerFailure
from rallypoint.launch.output.report import FailureReport, _fitted, clean, columns, compact, render


STACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "/home/me/train.py", line {n}, in f{n}\n    f{n + 1}()\n' for n in range(40)
)
NATIVE = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n" + "".join(
    f'  File "/home/me/train.py", line {n} in f{n}\n' for n in range(40)
)  # fmt: skip


def failure(rank: int = 0, **changes) -> WorkerFailure:
    defaults = {
        "host": "node0",
        "node_rank": 0,
        "rank": rank,
        "local_rank": rank,
        "pid": 4000 + rank,
        "generation": 0,
        "exit_code": 1,
        "signal": None,
        "raised": None,
        "native_stack": "",
        "cause": "",
        "stderr": (),
        "at": 1.0,
        "stopped_by_us": False,
    }
    return WorkerFailure(**{**defaults, **changes})


def killed(rank: int, number: int, **changes) -> WorkerFailure:
    return failure(rank, exit_code=None, signal=number, **changes)


def raising(rank: int = 0, type_="ValueError", message="bad", traceback=STACK, **changes):
    raised = Raised(type=type_, message=message, traceback=traceback, at=1.0, timestamp=1)
    return failure(rank, raised=raised, **changes)


def report(*failures: WorkerFailure, **changes) -> FailureReport:
    return FailureReport(**{"failures": failures, "world_size": 8, **changes})


def test_a_raised_exception():
    text = render(
        report(
            raising(1, "torch.cuda.Oops", "expected 3 channels, got 4", generation=1),
            killed(0, signal.SIGTERM, stopped_by_us=True),
            killed(2, signal.SIGTERM, stopped_by_us=True),
            killed(3, signal.SIGKILL, stopped_by_us=True),
            max_restarts=3,
            log_folder="/logs/x/attempt_1",
            report_file="/logs/x/report.json",
        )
    )
    lines = text.splitlines()
    assert lines[:3] == [
        "rally: the job failed: rank 1 raised torch.cuda.Oops (exit code 1); 3 others failed as a result",
        "  root cause   rank 1 (local rank 1) on node0, pid 4001, attempt 2 of 4",
        "  error        torch.cuda.Oops: expected 3 channels, got 4",
    ]
    assert lines[-4:] == [
        "  victims      ranks 0, 2: stopped (SIGTERM)",
        "               rank 3: stopped (SIGKILL)",
        "  logs         /logs/x/attempt_1",
        "  report       /logs/x/report.json",
    ]
    assert "f40()" in text, "the end of the stack is where it happened"
    assert "Traceback" not in text


def test_a_native_fault_shows_the_stack_of_its_thread():
    threads = """Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/usr/lib/queue.py", line 1 in get

Current thread 0x00007f02 (most recent call first):
  File "/home/me/train.py", line 7 in step

Thread 0x00007f03 (most recent call first):
  File "/home/me/other.py", line 3 in main
"""
    text = render(report(killed(0, signal.SIGSEGV, native_stack=threads)))
    assert "train.py" in text
    assert "queue.py" not in text
    assert "other.py" not in text


def test_a_signal_from_outside_shows_the_stack_of_the_script():
    threads = """Fatal Python error: Aborted

Current thread 0x00007f01 (most recent call first):
  File "/lib/rallypoint/elastic/worker/link.py", line 1 in _listen

Thread 0x00007f03 (most recent call first):
  File "/home/me/train.py", line 3 in main
"""
    text = render(report(killed(0, signal.SIGABRT, native_stack=threads)))
    assert "train.py" in text
    assert "link.py" not in text


def test_a_native_fault_shows_the_python_stack_from_the_fault_on():
    ours = '  File "/x/rallypoint/launch/worker/bootstrap.py", line 1 in _run\n  File "<string>", line 1\n'
    stack = NATIVE.replace("line 2 in f2\n", "line 2 in f2\n" + ours)
    text = render(report(killed(0, signal.SIGSEGV, native_stack=stack, stderr=("last words",))))
    assert "rank 0 was killed by SIGSEGV (signal 11)" in text
    assert "Segmentation fault" in text
    assert "line 2 in f2" in text
    assert "bootstrap.py" not in text
    assert "line 3 in" not in text, "what is below us is how we started it"
    assert "last words" in text


def test_a_native_fault_within_our_code_shows_the_script_that_called_it():
    stack = """Fatal Python error: Aborted

Current thread 0x00007f02 (most recent call first):
  File "/y/torch/distributed/distributed_c10d.py", line 2169 in _new_process_group_helper
  File "/x/rallypoint/launch/torch_private.py", line 57 in first
  File "/home/me/train.py", line 7 in <module>
  File "/x/rallypoint/launch/worker/bootstrap.py", line 306 in _run_script
  File "<string>", line 1 in <module>
"""
    text = render(report(killed(0, signal.SIGABRT, native_stack=stack)))
    assert "train.py" in text
    assert "bootstrap.py" not in text


def test_the_stack_of_a_child_is_told_from_that_of_a_worker():
    crashed = replace(killed(0, signal.SIGSEGV, native_stack=NATIVE), signal=None, exit_code=1)
    assert "where a child of it crashed (most recent call first)" in render(report(crashed))
    late = replace(
        crashed, native_stack=NATIVE.replace(NATIVE.splitlines()[0], "Timeout (0:00:30)!")
    )
    assert "at the fault" in render(report(late))


def test_a_killed_worker_shows_why_and_its_last_words():
    text = render(
        report(killed(0, signal.SIGKILL, cause="the OOM killer", stderr=("epoch 3", "epoch 4")))
    )
    assert "rank 0 was killed by SIGKILL (signal 9)" in text
    assert "  because      the OOM killer" in text
    assert "│ epoch 4" in text


def test_sys_exit_shows_the_code_and_its_text():
    text = render(report(raising(0, "SystemExit", "no licence", exit_code=1)))
    assert "rank 0 exited with code 1" in text
    assert "exit code    1 (SystemExit: no licence)" in text


def test_a_reason_without_a_culprit():
    text = render(
        report(killed(0, signal.SIGKILL, stopped_by_us=True), reason="its fork server was killed")
    )
    assert text.splitlines()[0] == "rally: the job failed: its fork server was killed"
    assert "root cause" not in text
    assert "victims      rank 0: stopped (SIGKILL)" in text


def test_why_a_worker_of_a_session_was_not_replaced_is_told_and_written():
    why = "--max-losses is used up (1 in 600 s)"
    told = report(killed(1, 9), killed(0, 15, stopped_by_us=True), not_replaced=why)
    assert f"\n  not replaced {why}" in render(told)
    assert "not replaced" not in render(report(killed(1, 9)))
    assert FailureReport.from_json(told.to_json()).not_replaced == why


def test_equal_fates_share_a_line():
    victims = [
        raising(
            rank,
            "RuntimeError",
            f"[/x/gloo/pair.cc:534] Connection closed by peer [10.0.0.{rank}]:1",
        )
        for rank in (1, 2, 3, 5)
    ]
    text = render(report(raising(0), *victims))
    assert "  victims      ranks 1-3, 5: RuntimeError: Connection closed by peer" in text


def test_many_fates_are_counted():
    victims = [raising(rank, "RuntimeError", f"fate {rank:x}" * 30) for rank in range(1, 30)]
    lines = render(report(raising(0), *victims)).splitlines()
    shown = lines[next(n for n, line in enumerate(lines) if "victims" in line) :]
    assert len(shown) <= 8
    assert re.search(r"and \d+ other ways; report.json has all", shown[-1])


def test_many_ranks_of_one_fate_stay_in_two_lines():
    victims = [killed(rank, 15, stopped_by_us=True) for rank in range(1, 2000, 2)]
    lines = render(report(raising(0), *victims)).splitlines()
    assert sum("stopped" in line or re.match(r"\s+\d+,", line) is not None for line in lines) <= 2
    assert len(lines) <= 40


def test_everything_at_once_is_at_most_forty_lines():
    root = raising(
        0,
        "RuntimeError",
        "\n".join(f"line {n} " * 40 for n in range(50)),
        signal=11,
        exit_code=None,
        native_stack=NATIVE,
        cause="because " * 100,
        stderr=tuple("word " * 50 for _ in range(20)),
        host="a-host-with-a-long-name." * 10,
    )
    quiet = killed(0, 6, native_stack=NATIVE, cause="because " * 100, stderr=("x " * 90,) * 20)
    victims = [raising(n, "RuntimeError", f"{n} " * 90) for n in range(1, 40)]
    for first in (root, quiet):
        text = render(
            report(first, *victims, log_folder="/l", report_file="/r", not_replaced="so " * 99)
        )
        assert len(text.splitlines()) <= 40, text


def test_colour_adds_nothing_but_colour():
    whole = report(raising(1), killed(0, 15, stopped_by_us=True), log_folder="/l")
    plain, coloured = render(whole), render(whole, colour=True)
    assert "\x1b" not in plain
    assert coloured != plain
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain
    for line in coloured.splitlines():
        assert (re.findall(r"\x1b\[\d*m", line) or ["\x1b[0m"])[-1] == "\x1b[0m", "colour runs on"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a window title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("bell\x07 back\x08space \x9b31m", "bell\ufffd back\ufffdspace \ufffd31m"),
        ("\u202etxt.exe", "txt.exe"),
        ("a\tb", "a   b"),
        ("half \udc80", "half \ufffd"),
        ("漢字 naïve 🙂", "漢字 naïve 🙂"),
    ],
)
def test_foreign_text_cannot_steer_the_terminal(text, shown):
    assert clean(text) == shown


@pytest.mark.parametrize(
    ("text", "wide"), [("abc", 3), ("漢字", 4), ("e\u0301", 1), ("🙂", 2), ("", 0)]
)
def test_columns(text, wide):
    assert columns(text) == wide


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([3, 0, 1, 2, 7], "0-3, 7"), ([1, 3], "1, 3"), ([], "")]
)
def test_compact(ranks, text):
    assert compact(ranks) == text


WILD = st.one_of(
    st.text(max_size=150),
    st.text(alphabet="漢字ｶﾅ🙂e\u0301\u200d \t\n\r\x1b[31mA\x07\u202e\u2028", max_size=150),
    st.text(alphabet="ab \n", max_size=600),
)
FAILURES = st.builds(
    failure,
    rank=st.integers(0, 5000),
    host=WILD,
    signal=st.one_of(st.none(), st.integers(1, 64)),
    exit_code=st.integers(1, 255),
    raised=st.one_of(
        st.none(),
        st.builds(
            Raised,
            type=st.one_of(st.just("SystemExit"), WILD),
            message=WILD,
            traceback=st.one_of(WILD, st.just(STACK)),
            at=st.just(1.0),
            timestamp=st.just(1),
        ),
    ),
    native_stack=st.one_of(st.just(""), WILD, st.just(NATIVE)),
    cause=st.one_of(st.just(""), WILD),
    stderr=st.lists(WILD, max_size=4).map(lambda lines: tuple(lines * 5)),
    stopped_by_us=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    failures=st.lists(FAILURES, max_size=4).map(lambda some: some * 3),
    reason=st.one_of(st.just(""), WILD),
    width=st.integers(60, 140),
)
def test_any_report_fits_its_columns_and_a_screen(failures, reason, width):
    text = render(report(*failures, reason=reason, log_folder="/l", report_file="/r"), width=width)
    lines = text.split("\n")
    assert len(lines) <= 40
    for line in lines:
        assert columns(line) <= width, line
        assert not any(unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"} for char in line)


def test_a_narrow_terminal_is_survived():
    assert render(report(raising(0)), width=1)


def test_of_a_long_stack_what_only_points_and_divides_goes_first():
    steps = [f'  File "/a/b.py", line {n}, in f{n}\n    g{n}()\n    ^^~~\n' for n in range(1, 6)]
    beginning = "Traceback (most recent call last):\n"
    text = f"{beginning}{''.join(steps[:2])}KeyError: 7\n\nThe cause of:\n\n{beginning}{''.join(steps[2:])}E: 7\n"
    lines = render(report(raising(0, "E", "7", text))).splitlines()
    stack = [line.removeprefix("  │ ") for line in lines if line.startswith("  │ ")]
    expected = [
        line
        for line in text.splitlines()
        if line.strip() and "^" not in line and line + "\n" != beginning
    ]
    assert stack == expected[:-1]
    # A short traceback is shown as it is.
    short = f"{beginning}{steps[0]}E: 7\n"
    lines = render(report(raising(0, "E", "7", short))).splitlines()
    assert any("^^~~" in line for line in lines)


def test_paths_are_shown_whole():
    path = "/a-folder" * 20
    assert f"  logs         {path}" in render(report(raising(0), log_folder=path)).splitlines()


def test_a_long_path_is_cut_at_its_beginning_so_that_file_and_line_stay():
    folder = "/very/long/" + "folder/" * 30
    line = f'  File "{folder}train.py", line 1234, in forward'
    fitted = _fitted(line, 96)
    assert fitted.startswith('  File "…')
    assert fitted.endswith('folder/train.py", line 1234, in forward')
    assert columns(fitted) == 96


def test_a_frame_whose_function_alone_is_too_long_still_fits():
    line = '  File "/a/b.py", line 1, in ' + "f" * 200
    assert columns(_fitted(line, 96)) <= 96


def test_a_frame_that_fits_is_left_alone():
    line = '  File "/a/b.py", line 1, in f'
    assert _fitted(line, 96) == line


def test_who_failed_by_itself_is_not_said_to_have_died_of_the_root_cause():
    alike = [raising(1), raising(2)]
    symptom = raising(3, "RuntimeError", "Connection closed by peer [10.0.0.1]:99")
    stopped = killed(4, signal.SIGTERM, stopped_by_us=True)
    first = [render(report(raising(0), *rest)).splitlines()[0] for rest in (alike, (symptom,))]
    assert first[0].endswith("; 2 other workers failed too")
    assert first[1].endswith("; 1 other failed as a result")
    both = render(report(raising(0), *alike, symptom, stopped), width=120).splitlines()[0]
    assert both.endswith("; 2 other workers failed too, 2 as a result")


def test_an_indented_message_is_not_shown_a_second_time_below_the_stack():
    message = "Expected a tensor\n             but got an array instead."
    stack = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in step\n    check(x)\n'
        f"    ~~~~~^^^\nTypeError: {message}\n"
    )
    text = render(report(raising(1, "TypeError", message, stack)), width=100)
    assert text.count("Expected a tensor") == text.count("but got an array") == 1
    assert "  │     ~~~~~^^^" in text
