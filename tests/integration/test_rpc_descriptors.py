"""A worker that has no descriptor left lets nobody in for a while, says so, and does not burn a core over it."""

from __future__ import annotations

import logging
import os
import resource
import time
from typing import Any

import pytest

import rpc_workers
from rallypoint import rpc
from rpc_workers import Workers, eventually


pytestmark = [pytest.mark.integration]

SPARE: list[int] = []


def add(a: int, b: int) -> int:
    return a + b


def join_by(transport: str) -> None:
    logging.basicConfig(force=True)
    rpc_workers.join(transports=(transport,))


def use_all() -> None:
    """Use up all descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    while True:
        try:
            SPARE.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return


def give_back() -> None:
    while SPARE:
        os.close(SPARE.pop())


def call(seconds: float) -> Any:
    try:
        return rpc.rpc_sync("w1", add, (1, 2), timeout=seconds)
    except rpc.RpcTimeout as error:
        return str(error)


def processor_time(seconds: float) -> float:
    began = time.process_time()
    time.sleep(seconds)
    return time.process_time() - began


@pytest.mark.parametrize("transport", ["uds", "tcp"])
def test_without_descriptors_it_waits_and_goes_on_when_there_are_some(transport: str) -> None:
    with Workers(2) as two:
        two.run(join_by, transport)
        two.on(1, use_all)
        assert "connection to 'w1'" in two.on(0, call, 0.5)
        assert two.on(1, processor_time, 1.0) < 0.3
        eventually(lambda: "this worker cannot accept connections" in two.output(1))
        two.on(1, give_back)
        assert two.on(0, call, 10.0) == 3
        two.run(rpc_workers.leave)
