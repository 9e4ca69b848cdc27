"""Checkpoints of sessions: written, found, loaded; full disks, damaged files, vanished places; the loss of a whole job."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elastic import wait_until
from ports import free_port
from rallypoint import elastic
from rallypoint._core.checkpoint_folder import entries
from rallypoint._core.checkpoint_records import RECORD, name_of
from rallypoint._core.storage import Directory, storage_at
from rallypoint.elastic.checkpointing import checkpoint_files, checkpoint_metadata, checkpoints
from rallypoint.elastic.checkpointing.checkpoints import Checkpoints
from rallypoint.errors import ElasticError
from supervisors import Popen, run


pytestmark = pytest.mark.integration


class Stop(Exception):
    pass


class Training:
    """A small training run, alone in this process. Its result depends on every draw and every batch."""

    def __init__(self, **model: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2)
        )
        if model:
            self.net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 20])
        data = TensorDataset(torch.arange(40), torch.randn(40, 8), torch.randint(2, (40,)))
        self.loader = DataLoader(data, batch_size=4, shuffle=True)
        self.seen: list[tuple[int, list[int]]] = []
        self.tasks: list[int] = []
        self.began = -1
        self.after_step: Callable[[int], None] = lambda _: None

    def run(
        self, where: Any, *, stop: int = -1, epochs: int = 3, every: int = 7, keep: int = 3
    ) -> str:
        with elastic.session(
            *(self.net, self.optimizer, self.scheduler),
            checkpoint=where,
            checkpoint_every=every,
            checkpoint_keep=keep,
        ) as session:
            self.began = session.position
            for epoch in session.epochs(epochs):
                for ids, x, y in session.batches(self.loader):
                    if session.position == stop:
                        raise Stop
                    with session.step():
                        loss = nn.functional.cross_entropy(self.net(x), y) * random.uniform(0.5, 1)
                        loss.backward()
                        self.optimizer.step()
                        self.optimizer.zero_grad()
                        self.scheduler.step()
                    self.seen.append((session.position, ids.tolist()))
                    finish(session)
                    self.after_step(session.position)
                session.run(self.tasks.append, epoch)
        return self.end()

    def end(self) -> str:
        state = self.optimizer.state_dict()["state"].values()
        tensors = [*self.net.state_dict().values(), *(each["exp_avg_sq"] for each in state)]
        bits = b"".join(each.detach().numpy().tobytes() for each in tensors)
        rest = [self.scheduler.get_last_lr(), torch.rand(1).item(), random.random()]
        return hashlib.sha256(bits).hexdigest() + str(rest)


def finish(session: elastic.Session) -> None:
    """Wait for the checkpoint under way, so that every one of these short steps gets its own."""
    checkpoints = session._checkpoints
    assert isinstance(checkpoints, Checkpoints)
    checkpoints._join()


def names(where: Any) -> list[str]:
    return [each.name for each in entries(storage_at(where)) if each.record]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    training = Training()
    return training.run(tmp_path_factory.mktemp("undisturbed")), training.seen


@pytest.fixture
def bucket() -> Iterator[str]:
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


def stopped(where: Any, at: int, **others: Any) -> Training:
    training = Training()
    with pytest.raises(Stop):
        training.run(where, stop=at, **others)
    return training


@pytest.mark.parametrize("kind", ["directory", "URL of a directory", "bucket"])
def test_the_next_start_goes_on_at_the_same_step_with_the_same_bits(
    kind: str, tmp_path: Path, bucket: str, undisturbed: tuple[str, list[Any]]
) -> None:
    where = {"directory": tmp_path / "a" / "b", "bucket": bucket}.get(kind, f"file://{tmp_path}/c")
    first = stopped(where, 13)
    assert names(where) == [name_of(7)]
    second = stopped(where, 25)
    assert second.began == 7
    third = Training()
    expected, seen = undisturbed
    assert third.run(where) == expected
    assert third.began == 21
    # Exactly once, except for the steps after the last checkpoint.
    parts = zip((first, second, third), (7, 21, 33), strict=True)
    assert [each for part, last in parts for each in part.seen if each[0] <= last] == seen
    assert (second.tasks, third.tasks) == ([0, 1], [1, 2])
    assert names(where) == [name_of(step) for step in (21, 28, 33)]
    # A finished job does nothing when it is started again.
    again = Training()
    again.run(where)
    assert (again.began, again.seen, again.tasks) == (33, [], [])
    longer = Training()
    longer.run(where, epochs=4)
    assert [step for step, _ in longer.seen] == list(range(34, 44))


def test_a_loop_that_was_left_goes_on_behind_its_last_step(tmp_path: Path) -> None:
    def drawn(where: Path, last: int) -> list[float]:
        found = []
        with elastic.session(nn.Linear(1, 1), checkpoint=where) as session:
            for _ in session.batches([1, 2, 3, 4]):
                with session.step():
                    found.append(torch.rand(1).item())
                if session.position == last:
                    break
        return found

    torch.manual_seed(1)
    expected = drawn(tmp_path / "calm", 4)
    torch.manual_seed(1)
    assert drawn(tmp_path / "left", 2) == expected[:2]
    # The last step of the first part is run again without effect.
    assert drawn(tmp_path / "left", 4)[1:] == expected[2:]


class Counted(Dataset[int]):
    """Records which samples were fetched."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> int:
        self.fetched.append(number)
        return number


def two_loops(
    where: Path, data: Sequence[Dataset[int]], stop: int
) -> list[tuple[list[int], float]]:
    """The batches and draws, up to a step, of two loops in each epoch. The very first loop is left early."""
    found = []

    own = [torch.Generator().manual_seed(7), None]
    loaders = [
        DataLoader(each, batch_size=10, shuffle=True, generator=generator)
        for each, generator in zip(data, own, strict=True)
    ]
    with contextlib.suppress(Stop):
        with elastic.session(nn.Linear(1, 1), checkpoint=where, checkpoint_every=1) as session:
            for _ in session.epochs(2):
                for loader in loaders:
                    for batch in session.batches(loader):
                        if session.position == stop:
                            raise Stop
                        with session.step():
                            found.append((batch.tolist(), torch.rand(1).item()))
                        finish(session)
                        if session.position == 2:
                            break
                    session.run(str)
    return found


def test_an_epoch_with_several_loops_goes_on_in_the_one_that_was_under_way(tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = two_loops(tmp_path / "calm", [Counted(), Counted()], -1)
    assert len(expected) == 11
    for stop in (1, 5, 6, 9, 12, 14):
        torch.manual_seed(1)
        where = tmp_path / str(stop)
        found = two_loops(where, [Counted(), Counted()], stop)
        torch.manual_seed(99)
        data = [Counted(), Counted()]
        found += two_loops(where, data, -1)
        assert found == expected, stop
        if stop in (5, 14):
            # The first loop of this epoch is complete.
            assert len(data[0].fetched) == (30 if stop == 5 else 0)


def test_a_second_loop_over_epochs_goes_on_where_the_first_one_ended(tmp_path: Path) -> None:
    def counted(*counts: int) -> list[int]:
        found = []
        with elastic.session(nn.Linear(1, 1), checkpoint=tmp_path) as session:
            for count in counts:
                for epoch in session.epochs(count):
                    with session.step():
                        found.append(epoch)
        return found

    with pytest.raises(ElasticError, match=r"write session\.epochs\(5\) for 2 more"):
        counted(3, 2)
    assert counted(0, 3, 5) == [0, 1, 2, 3, 4]
    assert counted(0, 3, 5, 6) == [5]


def one_part(
    where: Path, loader: Any, stop: int, epochs: int = 2
) -> tuple[list[list[int]], list[int]]:
    """Train up to a step at which the session is left with an exception."""
    found, scores = [], []
    net = nn.Linear(1, 1)
    with contextlib.suppress(Stop):
        with elastic.session(net, checkpoint=where, checkpoint_every=1) as session:
            for epoch in session.epochs(epochs):
                for batch in session.batches(loader() if callable(loader) else loader):
                    if session.position == stop:
                        raise Stop
                    with session.step():
                        found.append(batch.tolist())
                    finish(session)
                scores.append(epoch)
    return found, scores


class Whole(Dataset[torch.Tensor]):
    """Returns all samples of a list of indices."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.stack([torch.as_tensor(self.data[each]) for each in indices])


def loaders() -> dict[str, Callable[[Any], Any]]:
    found: dict[str, Callable[[Any], Any]] = {
        "elastic.Sampler": lambda data: DataLoader(
            data, batch_sampler=elastic.Sampler(len(data), 4, seed=5)
        ),
        # The data set reads whole batches.
        "elastic.Sampler without batches": lambda data: DataLoader(
            Whole(data), sampler=elastic.Sampler(len(data), 4, seed=5), batch_size=None
        ),
    }
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        return found
    return {
        **found,
        "StatefulDataLoader": lambda data: StatefulDataLoader(data, batch_size=4, shuffle=True),
        "StatefulDataLoader with workers": lambda data: StatefulDataLoader(
            data, batch_size=4, shuffle=True, num_workers=2
        ),
        "StatefulDataLoader with elastic.Sampler": lambda data: StatefulDataLoader(
            data, batch_sampler=elastic.Sampler(len(data), 4, seed=5)
        ),
    }


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", loaders())
def test_loaders_that_keep_their_place_go_on_without_fetching_what_was_done(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    expected, _ = one_part(tmp_path / "calm", loaders()[name](Counted()), -1)
    assert len(expected) == 16
    assert sorted(each for batch in expected[:8] for each in batch) == list(range(30))
    assert expected[:8] != expected[8:]
    torch.manual_seed(1)
    found = []
    for stop in (3, 8, 11, -1):  # 8: after the last batch of an epoch
        data = Counted()
        part, _ = one_part(tmp_path / "run", loaders()[name](data), stop)
        if data.fetched:  # in this process
            assert data.fetched[: len(part[0])] == part[0]
        found += part
        torch.manual_seed(99)
    assert found == expected


class Bar:
    """A progress bar around a loader."""

    def __init__(self, loader: Iterable[torch.Tensor]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from self.loader


class Pairs:
    """The batches of two loaders at once."""

    def __init__(self, *loaders: Iterable[torch.Tensor]) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.cat, zip(*self.loaders, strict=True))


def moved(loader: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for batch in loader:
        yield batch.to("cpu")


WITHIN: dict[str, Callable[..., Any]] = {
    "bar": Bar,
    "bars": lambda loader: Bar(Bar(loader)),
    "pairs": lambda loader: Pairs(loader, Bar(loader)),
    "generator": lambda loader: lambda: moved(loader),
    "nothing": lambda loader: loader,
}
SHUFFLED: dict[str, Callable[[Any], Any]] = {
    "sampler": lambda data: DataLoader(data, batch_sampler=elastic.Sampler(len(data), 4, seed=5)),
    "generator": lambda data: DataLoader(
        data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "workers": lambda data: DataLoader(
        data, batch_sampler=elastic.Sampler(len(data), 4, seed=5), num_workers=1
    ),
}


@pytest.mark.parametrize("loader", SHUFFLED)
@pytest.mark.parametrize("within", WITHIN)
def test_a_loader_within_another_object_has_its_order(
    within: str, loader: str, tmp_path: Path
) -> None:
    def made() -> Any:
        return WITHIN[within](SHUFFLED[loader](Drawing()))

    torch.manual_seed(1)
    expected, _ = one_part(tmp_path / "calm", made(), -1, 3)
    orders = [[int(each) for batch in expected[k : k + 8] for each in batch] for k in (0, 8, 16)]
    assert orders[0] != orders[1] != orders[2]
    torch.manual_seed(1)
    found = []
    for stop in (3, 8, 11, -1):
        part, _ = one_part(tmp_path / "run", made(), stop, 3)
        found += part
        torch.manual_seed(99)
    assert found == expected


class Drawing(Dataset[float]):
    """Its samples depend on a draw, as with a random transform."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, number: int) -> float:
        return number + torch.rand(1).item() / 2


@pytest.mark.parametrize("loader", ["sampler", "generator"])
def test_a_loader_that_has_begun_is_an_error(loader: str, tmp_path: Path) -> None:
    made = SHUFFLED[loader](Counted())
    for begun in (enumerate(made), zip(made, range(9)), (each for each in made)):  # noqa: B905
        with pytest.raises(ElasticError, match="has begun to iterate over a loader whose") as error:
            one_part(tmp_path / "run", begun, -1)
        assert str(error.value).endswith("and session.batch_index for the number of a batch")
    plain = DataLoader(Counted(), batch_size=4)
    with elastic.session(nn.Linear(1, 1)) as session:
        assert len(list(session.batches(enumerate(plain)))) == 8


def test_dcp_reads_it(tmp_path: Path) -> None:
    training = Training()
    training.run(tmp_path)
    other = Training()
    model = {key: torch.zeros_like(value) for key, value in other.net.state_dict().items()}
    state = {"model": model, "optimizer": {"state": {"3.weight": {"exp_avg": torch.zeros(2, 16)}}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that there is one process
        dcp.load(state, checkpoint_id=tmp_path / name_of(33))
    for key, value in training.net.state_dict().items():
        assert torch.equal(state["model"][key], value)
    moment = training.optimizer.state_dict()["state"][4]["exp_avg"]
    assert torch.equal(state["optimizer"]["state"]["3.weight"]["exp_avg"], moment)


def truncate(folder: Path) -> None:
    os.truncate(folder / "__0_0.distcp", 1000)


def change(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("r+b") as file:
        file.seek(5000)
        file.write(b"!!!!")


def lose(folder: Path) -> None:
    (folder / ".metadata").unlink()


def lose_record(folder: Path) -> None:
    (folder / RECORD).unlink()


def tear_record(folder: Path) -> None:
    os.truncate(folder / RECORD, 100)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, "step-00000014 at .* is damaged, .*: __0_0.distcp has 1,000 bytes, expected"),
        (change, "step-00000014 at .* is damaged, .*: __0_0.distcp has changed"),
        (lose, "step-00000014 at .* is damaged, .*: .metadata: .*No such file"),
        (lose_record, None),
        (tear_record, "step-00000014 at .* is damaged, .*: checkpoint.json"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    damage: Any, told: str | None, tmp_path: Path, caplog: Any, undisturbed: tuple[str, list[Any]]
) -> None:
    stopped(tmp_path, 15)
    damage(tmp_path / name_of(14))
    training = Training()
    assert training.run(tmp_path) == undisturbed[0]
    assert training.began == 7
    lines = [each.getMessage() for each in caplog.records if "is damaged" in each.getMessage()]
    assert len(lines) == (told is not None)
    if told is not None:
        assert re.search(told, lines[0])


def test_a_damaged_checkpoint_that_is_written_anew_goes_when_it_is_old(tmp_path: Path) -> None:
    stopped(tmp_path, 15)
    change(tmp_path / name_of(14))
    Training().run(tmp_path, keep=1)
    assert names(tmp_path) == [name_of(33)]


def test_if_none_can_be_loaded_training_begins_anew(
    tmp_path: Path, caplog: Any, undisturbed: tuple[str, list[Any]]
) -> None:
    stopped(tmp_path, 15)
    truncate(tmp_path / name_of(7))
    truncate(tmp_path / name_of(14))
    training = Training()
    assert training.run(tmp_path, every=10) == undisturbed[0]
    assert training.began == 0
    assert "no checkpoint at" in caplog.text
    # Those that could not be loaded stay, for someone to look at.
    assert names(tmp_path) == [name_of(step) for step in (7, 14, 20, 30, 33)]


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def sealed_again(folder: Path, path: str) -> None:
    """What somebody with write access to the folder does after changing a file."""
    record = json.loads((folder / RECORD).read_text())
    data = (folder / path).read_bytes()
    record["files"][path] = {"size": len(data), "digest": hashlib.sha256(data).hexdigest()}
    (folder / RECORD).write_text(json.dumps(record))


def test_a_planted_checkpoint_runs_no_code(tmp_path: Path) -> None:
    """In a folder that others may write to, whoever comes first decides what is loaded."""
    stopped(tmp_path, 8)
    folder, touched = tmp_path / name_of(7), tmp_path / "touched"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Touches(touched)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sealed_again(folder, ".metadata")
    with pytest.raises(elastic.ElasticError, match=r"it names posix.system, which is not part of"):
        Training().run(tmp_path)
    assert not touched.exists()


def test_a_planted_object_in_a_tensors_place_is_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the file changes after it was checked."""
    stopped(tmp_path, 8)
    folder, touched = tmp_path / name_of(7), tmp_path / "touched"
    data = io.BytesIO()
    torch.save(Touches(touched), data)
    (folder / "planted").write_bytes(data.getvalue())
    genuine = checkpoint_metadata.load

    def changed(file: Any) -> Any:
        found = genuine(file)
        if reads:
            for index, place in list(found.storage_data.items()):
                place.relative_path, place.offset = "planted", 0
                place.length = len(data.getvalue())
                found.storage_data[MetadataIndex(index.fqn)] = place
                found.state_dict_metadata[index.fqn] = BytesStorageMetadata()
        reads.append(1)
        return found

    reads: list[int] = []
    monkeypatch.setattr(checkpoint_metadata, "load", changed)
    with pytest.raises(elastic.ElasticError, match="is not a tensor"):
        Training().run(tmp_path)
    assert not touched.exists()


def test_another_model_is_an_error_and_nothing_is_overwritten(tmp_path: Path) -> None:
    stopped(tmp_path, 15)
    with pytest.raises(
        elastic.ElasticError, match=r"step-00000014 at .* does not fit: its 'model'"
    ):
        Training(other=True).run(tmp_path)
    assert names(tmp_path) == [name_of(7), name_of(14)]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_costs_the_checkpoint_only(
    tmp_path: Path, caplog: Any, undisturbed: tuple[str, list[Any]]
) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount")
    try:
        (tmp_path / "ballast").write_bytes(bytes(100 * 1024))
        training = Training()
        assert training.run(tmp_path) == undisturbed[0]
        full = [each.getMessage() for each in caplog.records if "not written" in each.getMessage()]
        assert full
        assert all("No space left on device" in each for each in full)
        assert all("; training goes on" in each for each in full[:-1])
        assert full[-1].startswith("the last checkpoint of step ")
        assert "; the one before is of step " in full[-1]
        whole = names(tmp_path)
        assert whole
        assert sorted(os.listdir(tmp_path)) == ["ballast", *whole]
        (tmp_path / "ballast").unlink()
        later = Training()
        later.run(tmp_path)
        assert name_of(later.began) == whole[-1]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_place_that_vanishes_costs_the_checkpoint_only(
    tmp_path: Path, caplog: Any, undisturbed: tuple[str, list[Any]]
) -> None:
    where = tmp_path / "run"
    training = Training()

    def vanish(step: int) -> None:
        if step == 9:
            shutil.rmtree(where)
            where.write_text("a file")
        if step == 17:
            where.unlink()

    training.after_step = vanish
    assert training.run(where) == undisturbed[0]
    told = [each.getMessage() for each in caplog.records]
    assert [each for each in told if "step 14 was not written" in each and "Not a dir" in each]
    # A directory that is gone is created again.
    assert names(where) == [name_of(step) for step in (21, 28, 33)]


def test_a_vanished_bucket_costs_the_checkpoint_only(
    bucket: str, caplog: Any, monkeypatch: Any, undisturbed: tuple[str, list[Any]]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("the bucket is gone")

    training = Training()

    def vanish(step: int) -> None:
        if step == 9:
            monkeypatch.setattr(type(fsspec.filesystem("memory")), "_open", refuse)
        if step == 17:
            monkeypatch.undo()

    training.after_step = vanish
    assert training.run(bucket) == undisturbed[0]
    assert "step 14 was not written to memory://bucket/run: the bucket is gone" in caplog.text
    assert names(bucket) == [name_of(step) for step in (21, 28, 33)]


@pytest.mark.parametrize("what", ["the folder", "a record"])
def test_a_place_that_cannot_be_read_for_a_moment_loses_no_checkpoint(
    what: str, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    read = Directory.read

    def cannot_list(*_: Any) -> Any:
        raise OSError(errno.EIO, "for a moment")

    def cannot_read(storage: Directory, path: str) -> bytes:
        found: bytes = cannot_list() if path.startswith(name_of(7)) else read(storage, path)
        return found

    def disturb(step: int) -> None:
        if step == 14:  # at whose end a checkpoint is written
            if what == "the folder":
                monkeypatch.setattr(Directory, "names", cannot_list)
            else:
                monkeypatch.setattr(Directory, "read", cannot_read)
        if step == 15:
            monkeypatch.undo()

    training = Training()
    training.after_step = disturb
    with pytest.raises(Stop):
        training.run(tmp_path, stop=16)
    assert names(tmp_path) == [name_of(7), name_of(14)]
    assert "not written" not in caplog.text


def test_places_that_cannot_be_used_are_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, told in (
        (tmp_path / "file", "it is"),
        (tmp_path / "file" / "x", "a part of the path is"),
    ):
        with pytest.raises(elastic.ElasticError) as caught:
            Training().run(place)
        assert str(caught.value).startswith(
            f"elastic.session: checkpoints cannot be kept at {place}: {told} a file, and a folder was expected"
        )
    with pytest.raises(ValueError, match="nosuchscheme"):
        elastic.session(checkpoint="nosuchscheme://x")
    with pytest.raises(ValueError, match="checkpoint_every is 0"):
        elastic.session(checkpoint=tmp_path, checkpoint_every=0)


def test_two_models_and_objects_of_any_kind(tmp_path: Path) -> None:
    class Odd:
        def __init__(self) -> None:
            self.held: Any = {3: [torch.arange(3), (1, 2)], "none": {}, "tuple": (torch.ones(1),)}

        def state_dict(self) -> Any:
            return self.held

        def load_state_dict(self, state: Any) -> None:
            self.held = state

    def made() -> Any:
        torch.manual_seed(0)
        nets = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")
        both = torch.optim.SGD([*nets[0].parameters(), *nets[1].parameters()], momentum=0.9)
        return *nets, both, torch.amp.GradScaler("cpu"), Odd()

    objects = made()
    with elastic.session(*objects, checkpoint=tmp_path) as session:
        with session.step():
            (objects[0](torch.ones(1, 2)) + objects[1](torch.ones(1, 2))).sum().backward()
            objects[2].step()
        objects[4].held["more"] = 1.5
    again = made()
    with elastic.session(*again, checkpoint=tmp_path) as session:
        assert session.position == 1
    for one, other in zip(objects[:2], again[:2], strict=True):
        assert torch.equal(one.weight, other.weight)
    assert again[2].state_dict()["state"].keys() == objects[2].state_dict()["state"].keys()
    assert again[3].state_dict() == objects[3].state_dict()
    held = again[4].held
    assert held.keys() == {3, "none", "tuple", "more"}
    assert torch.equal(held[3][0], torch.arange(3))
    assert (held[3][1], held["none"], type(held["tuple"])) == ((1, 2), {}, tuple)
    assert list(dict(made()[1].named_parameters())) == ["_orig_mod.weight", "_orig_mod.bias"]
    record = json.loads((tmp_path / name_of(1) / RECORD).read_text())
    assert record["objects"] == ["model", "model_2", "optimizer", "scaler", "odd"]


def test_parameters_of_no_module_are_in_it(tmp_path: Path) -> None:
    def trained(steps: int) -> list[Any]:
        torch.manual_seed(0)
        net, scale = nn.Linear(2, 1), torch.ones(1, requires_grad=True)
        optimizer = torch.optim.Adam([scale, *net.parameters()])
        with elastic.session(net, optimizer, checkpoint=tmp_path / "run") as session:
            while session.position < steps:
                with session.step():
                    (net(torch.ones(1, 2)) * scale).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return [scale.item(), *net.weight.flatten().tolist()]

    trained(2)
    resumed = trained(5)
    record = json.loads((tmp_path / "run" / name_of(5) / RECORD).read_text())
    assert record["objects"] == ["model", "optimizer", "parameters"]
    shutil.rmtree(tmp_path / "run")
    assert trained(5) == resumed


def test_a_named_tuple_costs_the_checkpoint_only(tmp_path: Path, caplog: Any) -> None:
    class Pair(NamedTuple):
        one: torch.Tensor
        other: int

    class Odd:
        def state_dict(self) -> Any:
            return {"pair": Pair(torch.ones(1), 1)}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    with elastic.session(Odd(), checkpoint=tmp_path) as session, session.step():
        pass
    assert names(tmp_path) == []
    assert re.search("the last checkpoint of step 1 was not written .*Pair", caplog.text)
    assert caplog.text.rstrip().endswith("this run has written no other")


def test_a_session_says_what_it_waits_for_at_its_end(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "SILENCE", 0.1)
    was_told = threading.Event()
    write = checkpoint_files.write

    def wait_to_write(*args: Any) -> Any:
        assert was_told.wait(60)
        return write(*args)

    class Hearer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is still writing" in record.getMessage():
                was_told.set()

    monkeypatch.setattr(checkpoint_files, "write", wait_to_write)
    hearer = Hearer()
    logging.getLogger("rallypoint").addHandler(hearer)
    try:
        with elastic.session(torch.nn.Linear(1, 1), checkpoint=tmp_path) as session, session.step():
            pass
    finally:
        logging.getLogger("rallypoint").removeHandler(hearer)
    assert names(tmp_path) == [name_of(1)]
    assert (
        f"rank 0 is still writing the checkpoint of step 1 to {tmp_path}; the session ends once that is done"
        in caplog.text
    )


# -- jobs ---------------------------------------------------------------------------------------------

JOB = """
import hashlib, json, os, pathlib, random, signal, sys, time
import psutil
from rallypoint import elastic
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def supervisor():
    server = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(server.rpartition(")")[2].split()[1])

folder, place = pathlib.Path(sys.argv[1]), sys.argv[2]
faults = json.loads(sys.argv[3])  # [step, rank], of 100 + rank: the job is told to stop, of 200 + rank: all its processes are,
# of 300 + rank: others tell it
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.arange(48), torch.randn(48, 4), torch.randint(2, (48,)))
sampler = torch.utils.data.DistributedSampler(data, shuffle=True, seed=3)
loaders = 2 if any(who >= 200 for _, who in faults) else 0
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler, num_workers=loaders)
torch.manual_seed(100 + rank)
with elastic.session(net, optimizer, checkpoint=place, checkpoint_every=5) as session:
    if rank == 0:
        with (folder / "began").open("a") as file:
            file.write(f"{session.position}\\n")
    for epoch in session.epochs(2):
        sampler.set_epoch(epoch)
        for ids, x, y in session.batches(loader):
            with session.step():
                for number, (step, who) in enumerate(faults):
                    mark = folder / f"fault {number}"
                    if (step, who % 100) == (session.position, rank) and not mark.exists():
                        mark.touch()
                        if who >= 100:
                            whom = [supervisor()] if who < 300 else []
                            if 200 <= who < 300:
                                whom += psutil.Process(whom[0]).children(recursive=True)
                                whom = [getattr(each, "pid", each) for each in whom]
                                random.Random(0).shuffle(whom)
                            # Twice, as `timeout` does; systemd sends SIGHUP to all processes of a session right afterwards.
                            for each in whom:
                                os.kill(each, signal.SIGTERM)
                            time.sleep(0.02)
                            for each in whom:
                                os.kill(each, signal.SIGTERM if who < 200 else signal.SIGHUP)
                            while not session._kept.link.is_stopping:
                                time.sleep(0.01)
                            continue
                        os.kill(os.getpid(), signal.SIGKILL)
                session.local["ids"] = session.local.get("ids", 0) + int(ids.sum())
                torch.nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            with (folder / f"ids {rank} of {size}").open("a") as file:
                file.write(json.dumps([session.position, ids.tolist()]) + "\\n")
            # So that no checkpoint of these short steps is left out.
            session._checkpoints._join()
            with (folder / f"files {rank}").open("a") as file:
                file.write(f"{len(os.listdir('/proc/self/fd'))}\\n")
bits = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
end = [session.position, hashlib.sha256(bits).hexdigest(), torch.rand(1).item(), session.local["ids"]]
(folder / f"end {rank}").write_text(json.dumps(end))
dist.destroy_process_group()
"""


def job(
    folder: Path, faults: list[list[int]], *flags: str, workers: int = 2
) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(JOB)
    return run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", str(workers), *flags),
            *(str(script), str(folder), str(folder / "checkpoints"), json.dumps(faults)),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )


def ends(folder: Path) -> list[Any]:
    return [json.loads((folder / f"end {rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def calm_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a job leaves to which nothing happens."""
    folder = tmp_path_factory.mktemp("jobs") / "calm"
    done = job(folder, [])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


@pytest.fixture(scope="module")
def calm(calm_job: Path) -> list[Any]:
    """How its ranks end."""
    return ends(calm_job)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_leaves_no_open_file(rank: int, calm_job: Path) -> None:
    """A training of weeks takes thousands, and a process may have 1024."""
    after_steps = (calm_job / f"files {rank}").read_text().split()
    # The first checkpoint is of step 5, the last one of step 20.
    assert len(set(after_steps[6:])) == 1, after_steps


def test_a_job_that_is_lost_goes_on_at_its_last_checkpoint(tmp_path: Path, calm: list[Any]) -> None:
    # The job recovers from the first loss in place; the second one costs all ranks their processes.
    lost = job(tmp_path / "lost", [[3, 0], [13, 1]], "--max-losses", "1", "--max-restarts", "1")
    assert lost.returncode == 0, lost.stderr
    assert (
        lost.stderr.count("training continues at step 10, from the checkpoint step-00000010") == 1
    )
    assert ends(tmp_path / "lost") == calm
    assert (tmp_path / "lost" / "began").read_text().split() == ["0", "3", "10"]
    # The whole job is killed, and restarted by hand.
    killed = job(tmp_path / "killed", [[22, 0]], "--max-losses", "0")
    assert killed.returncode == 128 + signal.SIGKILL
    assert job(tmp_path / "killed", [[22, 0]]).returncode == 0
    assert ends(tmp_path / "killed") == calm
    # And on another number of ranks: no sample twice, none left out.
    other = job(tmp_path / "other", [[17, 0]], "--max-losses", "0")
    assert other.returncode == 128 + signal.SIGKILL
    assert (tmp_path / "other" / "checkpoints" / name_of(15) / RECORD).exists()
    alone = job(tmp_path / "other", [], workers=1)
    assert alone.returncode == 0, alone.stderr
    ids = [
        json.loads(line)
        for name in ("ids 0 of 2", "ids 1 of 2", "ids 0 of 1")
        for line in (tmp_path / "other" / name).read_text().splitlines()
    ]
    # 15 steps of two ranks are 12 of the first epoch, and 3 of the second one.
    first = [each for step, batch in ids if step <= 12 for each in batch]
    assert sorted(first) == list(range(48))


def test_rank_0_may_be_lost_in_the_very_first_step_and_in_the_first_one_behind_a_checkpoint(
    tmp_path: Path, calm: list[Any]
) -> None:
    faults = [[0, 0], [13, 1]]
    lost = job(tmp_path / "job", faults, "--max-losses", "1")
    assert lost.returncode == 128 + signal.SIGKILL
    again = job(tmp_path / "job", [*faults, [10, 0]])
    assert again.returncode == 0, again.stderr
    assert "rank 0 is back at step 0" in lost.stderr and "rank 0 is back at step 10" in again.stderr
    assert "was not written" not in lost.stderr + again.stderr
    assert ends(tmp_path / "job") == calm
    assert names(tmp_path / "job" / "checkpoints") == [name_of(step) for step in (15, 20, 24)]


@pytest.mark.parametrize("who", [101, 201], ids=["supervisor", "all processes"])
def test_a_job_that_is_told_to_stop_takes_a_last_checkpoint(
    tmp_path: Path, calm: list[Any], who: int
) -> None:
    stopped = job(tmp_path / "job", [[7, who]])
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    told = re.search(
        r"told to stop: the last checkpoint, of step (\d+), is written", stopped.stderr
    )
    assert told is not None, stopped.stderr
    step = int(told[1])
    assert 8 <= step <= 10, "no more than a few steps later"
    assert (tmp_path / "job" / "checkpoints" / name_of(step) / RECORD).exists()
    again = job(tmp_path / "job", [[7, who]])
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "job" / "began").read_text().split() == ["0", str(step)]
    assert ends(tmp_path / "job") == calm


def test_an_elastic_job_whose_nodes_are_all_told_to_stop_takes_a_last_checkpoint(
    tmp_path: Path, calm: list[Any]
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(JOB)
    port = free_port()
    words = [
        *(sys.executable, "-m", "rallypoint", "run", "--nnodes", "2:3", "--insecure"),
        *("--nproc-per-node", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"),
        *("--rdzv-conf", "last_call_timeout=2", "train.py", str(folder)),
        *(str(folder / "checkpoints"), "[[7, 301]]"),
    ]
    nodes = [Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        wait_until((folder / "fault 0").exists, "rank 1 in its step")
        for each in nodes:
            each.send_signal(signal.SIGTERM)
            time.sleep(0.02)
            each.send_signal(signal.SIGTERM)  # as from a wrapper that got it, too
            time.sleep(0.3)  # the time between two hosts of a cluster
        said = [each.communicate(timeout=100)[1] for each in nodes]
    finally:
        for each in nodes:
            each.kill()
            each.wait()
    assert [each.returncode for each in nodes] == [128 + signal.SIGTERM] * 2, said
    told = re.search(r"the last checkpoint, of step (\d+), is written", "".join(said))
    assert told is not None, said
    assert "place" not in "".join(said), "nobody takes over: the job stops"
    assert (folder / "checkpoints" / name_of(int(told[1])) / RECORD).exists()
    again = job(folder, [[7, 301]])
    assert again.returncode == 0, again.stderr
    assert (folder / "began").read_text().split() == ["0", told[1]]
    assert ends(folder) == calm


@pytest.mark.long
def test_a_worker_that_cannot_take_a_last_checkpoint_is_ended_in_time(tmp_path: Path) -> None:
    # It waits in its step for longer than the grace period.
    JOB_THAT_HANGS = JOB.replace(
        "                            continue\n", "                            time.sleep(600)\n"
    )
    (tmp_path / "train.py").write_text(JOB_THAT_HANGS)
    done = run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "2"),
            *("--shutdown-timeout", "2", "train.py", str(tmp_path), "saved", "[[7, 101]]"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "the last checkpoint" not in done.stderr


LAYOUT = """
import os, sys, torch, torch.distributed as dist
from rallypoint import elastic
from rallypoint.elastic import torch_private

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
ddp = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
is_again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
with elastic.session(ddp, optimizer, checkpoint=sys.argv[1]) as session:
    while session.position < 2:
        with session.step():
            ddp(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(session.position, torch_private.layout_of_buckets(ddp))
sys.exit(not is_again)
"""


def test_sums_are_rounded_in_the_same_order_from_the_first_step_on(tmp_path: Path) -> None:
    # DDP settles its layout in its second pass: without it, the sums of three ranks or more would differ in the first one.
    script = tmp_path / "train.py"
    script.write_text(LAYOUT)
    done = run(
        [
            *(sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", "1"),
            *("--max-restarts", "1", str(script), str(tmp_path / "checkpoints")),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert before == after == "2 [[3, 2, 1, 0]]"
