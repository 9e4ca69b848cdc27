"""A worker with an allow-list applies it to answers, too: to those of a compromised worker, for example."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rpc_workers
from rallypoint import rpc
from rallypoint.errors import ProtocolError, RemoteError
from rallypoint.rpc.agent import serving
from rpc_workers import Workers, eventually


pytestmark = [pytest.mark.integration]


@pytest.fixture
def careful() -> Iterator[Workers]:
    """w0 reads by a list, w1 accepts everything."""
    with Workers(2) as workers:
        pending = workers.begin(1, rpc_workers.join)
        workers.on(0, functools.partial(rpc_workers.join, allowed_modules=[f"{__name__}.Listed"]))
        pending.result(10)
        yield workers
        workers.run(rpc_workers.leave)


class Listed(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Unlisted(Exception):
    pass


class Exploit:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def answer(what: Any) -> Any:
    return MADE[what]() if isinstance(what, str) else what


MADE: dict[str, Any] = {
    "tensor": lambda: torch.arange(3),
    "large": lambda: torch.ones(100_000).view(100, 1000).t(),
    "nested": lambda: {"a": [1, 2.5, (torch.ones(2), None)]},
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "listed": lambda: Listed(3),
    "me": lambda: rpc.get_worker_info(),
}


def exploit(path: str) -> Any:
    return [1, Exploit(path)]


def exploits(path: str) -> Iterator[Any]:
    yield 1
    yield Exploit(path)


def fail(kind: type[Exception], *args: Any) -> None:
    raise kind(*args)


def fail_with_more(path: str) -> None:
    """Answer with a description that only a compromised worker would send."""
    describe = serving.describe

    def lie(error: BaseException) -> Any:
        serving.describe = describe
        frozen = pickle.dumps((ValueError, ("harmless",), {"more": Exploit(path)}))
        return {**describe(error), "error": frozen}

    serving.describe = lie
    raise ValueError("harmless")


def own() -> Any:
    return rpc.RRef([1])


def test_what_needs_no_entry_and_what_is_listed_comes_back(careful):
    def case():
        for name, make in MADE.items():
            found = rpc.rpc_sync("w1", answer, (name,))
            assert type(found) is type(make())
        assert rpc.rpc_sync("w1", answer, ("nested",))["a"][2][0].tolist() == [1, 1]
        made = rpc.remote("w1", answer, ("tensor",))
        assert made.to_here().tolist() == [0, 1, 2]
        theirs = rpc.rpc_sync("w1", own)
        assert theirs.to_here() == [1]
        assert list(rpc.rpc_stream("w1", range, (3,))) == [0, 1, 2]

    careful.on(0, case)


def test_an_answer_that_names_another_is_refused_and_not_carried_out(careful, tmp_path):
    def case(path):
        refused = pytest.raises(rpc.NotAllowed, match="posix.mkdir.*allowed_modules")
        with refused:
            rpc.rpc_sync("w1", exploit, (path,))
        with refused:
            rpc.rpc_async("w1", exploit, (path,)).wait()
        with refused:
            rpc.remote("w1", exploit, (path,)).to_here()
        stream = rpc.rpc_stream("w1", exploits, (path,))
        assert next(stream) == 1
        with refused:
            next(stream)
        assert rpc.rpc_sync("w1", max, (1, 2)) == 2

    path = tmp_path / "made"
    careful.on(0, case, str(path))
    assert not path.exists()
    # The other worker has no list: the message does what it says there.
    careful.on(1, lambda where: rpc.rpc_sync("w1", exploit, (where,)), str(path))
    assert path.exists()


def test_exceptions_keep_their_type_where_that_is_allowed(careful):
    def case():
        for kind, args in (
            (ValueError, ("bad",)),
            (KeyError, ("k",)),
            (FileNotFoundError, (2, "no", "file")),
            (UnicodeDecodeError, ("utf-8", b"x", 0, 1, "why")),
            (ExceptionGroup, ("several", [ValueError(1), TypeError(2)])),
            (ProtocolError, ("odd",)),
        ):
            with pytest.raises(kind) as caught:
                rpc.rpc_sync("w1", fail, (kind, *args))
            assert type(caught.value) is kind
            assert "in fail" in str(caught.value.__cause__)
        with pytest.raises(Listed) as caught:
            rpc.rpc_sync("w1", fail, (Listed, 3))
        assert caught.value.number == 3
        with pytest.raises(RemoteError, match="the text") as caught:
            rpc.rpc_sync("w1", fail, (Unlisted, "the text"))
        assert type(caught.value) is RemoteError
        assert caught.value.type_name == f"{__name__}.Unlisted"
        assert "in fail" in caught.value.traceback

    careful.on(0, case)


def test_what_hides_in_an_exception_is_not_carried_out(careful, tmp_path):
    def case(path):
        with pytest.raises(RemoteError, match="harmless"):
            rpc.rpc_sync("w1", fail_with_more, (path,))

    path = tmp_path / "made"
    careful.on(0, case, str(path))
    assert not path.exists()
    careful.on(1, lambda where: _attempt(where), str(path))
    assert path.exists()


def _attempt(path: str) -> None:
    with pytest.raises(ValueError, match="harmless"):
        rpc.rpc_sync("w1", fail_with_more, (path,))


def test_an_answer_that_is_refused_holds_no_reference(careful):
    def case():
        rpc.rpc_sync("w1", max, (1, 2))
        with pytest.raises(rpc.NotAllowed, match="allowed_modules"):
            rpc.rpc_sync("w1", with_reference)

    careful.on(0, case)
    owned = lambda: rpc.api._rref_context_get_debug_info()["num_owner_rrefs"]  # noqa: E731
    careful.on(1, lambda: eventually(lambda: owned() == "0"))


def with_reference() -> Any:
    return [rpc.RRef([1]), Unlisted("x")]
