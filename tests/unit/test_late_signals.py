"""Signals that arrive while a supervisor exits, and what it expects of a machine before torch has counted its devices."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.launch import supervisor as supervisors
from rallypoint.launch.config import Job, LaunchConfig, RendezvousConfig, TargetKind
from rallypoint.launch.coordination.interface import LoneNode
from rallypoint.launch.output.console import Console
from rallypoint.launch.placement import topology
from rallypoint.launch.signals import SignalEvents
from rallypoint.launch.supervisor import Supervisor


CONFIG = LaunchConfig(
    job=Job(kind=TargetKind.FUNCTION, name="f"), rendezvous=RendezvousConfig(run_id="x")
)


@pytest.fixture
def node() -> Iterator[LoneNode]:
    made = LoneNode()
    yield made
    made.close("")


def supervisor(config: LaunchConfig, node: LoneNode) -> Supervisor:
    return Supervisor(
        config, coordination=node, console=Console(), say=lambda text: None, token="t"
    )


def test_a_signal_that_nobody_took_has_its_effect_on_the_caller_of_a_function_launch(node) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with supervisor(CONFIG, node)._listening():
            signal.raise_signal(signal.SIGTERM)
            assert came == []
        assert came == [signal.SIGTERM]
        with supervisor(CONFIG, node)._listening() as received:
            signal.raise_signal(signal.SIGTERM)
            assert received.take() == [signal.SIGTERM]
        assert came == [signal.SIGTERM], "the supervisor has dealt with it"
        with pytest.raises(KeyboardInterrupt), supervisor(CONFIG, node)._listening():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_command_has_ended_when_its_job_has(node) -> None:
    script = replace(CONFIG, job=Job(kind=TargetKind.SCRIPT, name="x.py"))
    with supervisor(script, node)._listening():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("workers", "accelerator", "devices", "threads"),
    [
        (None, "cuda", 1, None),
        (None, "cuda", 4, "1"),
        (None, "cuda", 0, "1"),  # the count cannot be determined
        (None, None, 1, "1"),  # one worker per CPU, if torch finds no device
        (1, None, 1, None),
        (2, None, 1, "1"),
    ],
)
def test_threads_of_workers_whose_number_torch_is_still_to_count(
    workers: int | None,
    accelerator: str | None,
    devices: int,
    threads: str | None,
    monkeypatch,
    node: LoneNode,
) -> None:
    given: dict[str, str] = {}

    def start(config: Any, env: dict[str, str], *more: Any) -> None:
        given.update(env)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(supervisors, "start_server", start)
    monkeypatch.setattr(topology, "num_devices", lambda env: devices)
    supervisor(
        replace(CONFIG, workers_per_node=workers, accelerator=accelerator), node
    )._start_server()
    assert given.get("OMP_NUM_THREADS") == threads


def test_a_hangup_that_comes_with_another_signal_is_taken_last() -> None:
    numbers = {signal.SIGHUP, signal.SIGTERM}
    with SignalEvents(numbers) as received:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert received.take() == [signal.SIGTERM, signal.SIGHUP]
