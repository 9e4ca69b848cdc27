"""Stacks: reading the output of faulthandler and py-spy, and groups of processes with the same stack."""

from __future__ import annotations

import faulthandler
import json
import tempfile
import threading

import pytest
from hypothesis import given, strategies as st

from rallypoint.control.stacks import stack_groups, stack_records


def dumped() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def test_what_faulthandler_writes_is_read_whole() -> None:
    begun, over = threading.Event(), threading.Event()

    def beside() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=beside)
    thread.start()
    begun.wait()
    try:
        found = stack_records.from_faulthandler(dumped())
    finally:
        over.set()
        thread.join()
    assert [each["function"] for each in found[0]["frames"]][-1] == "dumped", "main thread first"
    frame = found[0]["frames"][-1]
    assert frame["file"] == __file__
    assert frame["line"] == dumped.__code__.co_firstlineno + 2
    others = [[each["function"] for each in it["frames"]] for it in found[1:]]
    # Other threads of this process may wait, too.
    (ours,) = (each for each in others if "beside" in each)
    # Most recent call last, as in a traceback.
    assert ours.index("run") < ours.index("beside")


LAUNCHED = """\
Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 9 in wait
Current thread 0x00007f00 [main] (most recent call first):
  File "/home/me/train.py", line 7 in load
  File "/home/me/train.py", line 20 in <module>
  File "/x/rallypoint/launch/worker/bootstrap.py", line 306 in _run_script
  File "/x/rallypoint/launch/server/forkserver.py", line 564 in main
  File "<string>", line 1 in <module>
"""


def test_what_is_above_the_script_is_left_out() -> None:
    main, other = stack_records.from_faulthandler(LAUNCHED)
    assert [(each["function"], each["line"]) for each in main["frames"]] == [
        ("<module>", 20),
        ("load", 7),
    ]
    assert main["name"] == "main"
    assert [each["function"] for each in other["frames"]] == ["wait"]


# A print that waits for a pipe's reader; and the first process group, which waits for the others.
WITHIN = """\
Current thread 0x00007f00 [main] (most recent call first):
  File "/x/rallypoint/_core/whole_writes.py", line 37 in _write_some
  File "/x/rallypoint/launch/worker/streams.py", line 102 in flush
  File "/home/me/train.py", line 20 in <module>
  File "/x/rallypoint/launch/worker/bootstrap.py", line 306 in _run_script
  File "<string>", line 1 in <module>
"""
MODULE = """\
Current thread 0x00007f00 [main] (most recent call first):
  File "/y/torch/distributed/distributed_c10d.py", line 2169 in _new_process_group_helper
  File "/x/rallypoint/launch/torch_private.py", line 57 in first
  File "/home/me/train.py", line 4 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main
  File "/x/rallypoint/launch/torch_private.py", line 182 in run_module_as_main
  File "/x/rallypoint/launch/worker/bootstrap.py", line 302 in _execute
  File "<string>", line 1 in <module>
"""
FORKED = """\
Current thread 0x00007f00 [main] (most recent call first):
  File "/home/me/train.py", line 5 in work
  File "/x/rallypoint/launch/worker/payload.py", line 378 in run_call
  File "/x/rallypoint/launch/functions.py", line 328 in call_in_fork
  File "/x/rallypoint/launch/worker/bootstrap.py", line 296 in _execute
  File "/x/rallypoint/launch/supervisor.py", line 279 in _start_server
  File "/home/me/train.py", line 10 in <module>
"""
OF_CHILD = """\
Current thread 0x00007f00 [main] (most recent call first):
  File "/y/torch/utils/data/_utils/worker.py", line 250 in _worker_loop
  File "/lib/python3.11/multiprocessing/process.py", line 314 in _bootstrap
  File "/home/me/train.py", line 30 in <module>
  File "/x/rallypoint/launch/worker/bootstrap.py", line 306 in _run_script
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [(WITHIN, [20, 102, 37]), (MODULE, [4, 57, 2169]), (FORKED, [5]), (OF_CHILD, [250])],
)
def test_the_script_is_shown_also_if_it_has_called_our_code(text: str, lines: list[int]) -> None:
    (main,) = stack_records.from_faulthandler(text)
    assert [each["line"] for each in main["frames"]] == lines


def test_a_process_that_is_still_in_our_code_keeps_its_frames() -> None:
    text = 'Current thread 0x0 (most recent call first):\n  File "/rallypoint/launch/a.py", line 1 in f\n'
    assert [each["function"] for each in stack_records.from_faulthandler(text)[0]["frames"]] == [
        "f"
    ]


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    stack_records.from_faulthandler(text)
    stack_records.from_faulthandler(f"Thread 0x0 (most recent call first):\n{text}")


def spied(**changes: object) -> str:
    def thread(number: int, name: str) -> dict[str, object]:
        frame = {"filename": "/a.py", "line": number, "name": f"in_{name}"}
        start = {"filename": "/rallypoint/launch/x.py", "line": 1, "name": "start"}
        frames = [frame, start]
        return {"pid": 7, "os_thread_id": number, "thread_name": name, "frames": frames, **changes}

    return json.dumps([thread(9, "other"), thread(7, "MainThread")])


def test_what_py_spy_prints_is_read() -> None:
    main, other = stack_records.from_py_spy(spied())
    assert main["name"] == "MainThread"
    assert [each["function"] for each in main["frames"]] == ["in_MainThread"]
    assert other["name"] == "other"


@pytest.mark.parametrize("text", ["", "[1]", "{}", spied(frames=3), '[{"pid": 1}]'])
def test_anything_else_than_py_spys_is_told(text: str) -> None:
    with pytest.raises(ValueError):
        stack_records.from_py_spy(text)


# -- groups ---------------------------------------------------------------------------------------


def process(rank: int, line: int | None, name: str = "") -> dict[str, object]:
    frames = [{"file": "/x/site-packages/torch/a.py", "line": line, "function": f"at_{line}"}]
    threads = [] if line is None else [{"name": "", "frames": frames}, {"name": "t", "frames": []}]
    why = "it is stopped" if line is None else ""
    return {"rank": rank, "pid": 100 + rank, "name": name, "threads": threads, "why": why}


def test_the_odd_one_comes_first() -> None:
    found = [process(0, 5), process(1, 5), process(2, 9), process(3, 5, "pt_data_worker")]
    assert [[each["rank"] for each in group] for group in stack_groups.groups(found)] == [
        [2],
        [0, 1],
        [3],
    ], "children last"
    text = stack_groups.text(found)
    assert text.splitlines() == [
        "rank 2 (pid 102), in at_9:",
        "    torch/a.py:9 in at_9",
        "    (and 1 other thread)",
        "",
        "ranks 0, 1, in at_5:",
        "    torch/a.py:5 in at_5",
        "    (and 1 other thread)",
        "",
        "pt_data_worker 103 of rank 3:",
        "    torch/a.py:5 in at_5",
        "    (and 1 other thread)",
    ]


def test_a_process_without_a_stack_says_why() -> None:
    assert "no stack: it is stopped" in stack_groups.text([process(0, None), process(1, 3)])


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_each_process_is_in_one_group(made: list[tuple[int, bool]]) -> None:
    found = [process(rank, line, "c" if child else "") for rank, (line, child) in enumerate(made)]
    grouped = stack_groups.groups(found)
    assert sorted(each["rank"] for group in grouped for each in group) == list(range(len(made)))
    for group in grouped:
        assert len({(each["name"], str(each["threads"])) for each in group}) == 1
    sizes = [len(group) for group in grouped if not group[0]["name"]]
    assert sizes == sorted(sizes)


def test_processes_whose_other_threads_differ_are_shown_apart_with_all_threads() -> None:
    def process(rank: int, *lines: int) -> dict[str, object]:
        frames = [[{"file": "/a.py", "line": line, "function": "f"}] for line in lines]
        threads = [{"name": "", "frames": each} for each in frames]
        return {"rank": rank, "pid": rank, "name": "", "threads": threads, "why": ""}

    processes = [process(0, 1, 2, 3), process(1, 1, 3, 2), process(2, 1, 2, 4)]
    assert len(stack_groups.groups(processes)) == 1
    apart = stack_groups.groups(processes, all_threads=True)
    assert [[each["rank"] for each in group] for group in apart] == [[2], [0, 1]]
    assert "/a.py:4 in f" in stack_groups.text(processes, all_threads=True)
