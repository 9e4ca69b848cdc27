"""Where a group's secret comes from, and that all members arrive at the same one or learn why not."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, strategies as st

from rallypoint._core import secret as job_secret
from rallypoint._core.user_key import user_key
from rallypoint.errors import ConfigError, RpcError
from rallypoint.rpc import trust
from rallypoint.rpc.groups.signing import Signer
from rallypoint.rpc.trust import Choice, Place, agree, choose, place_of
from rallypoint.wire import auth


GIVEN = b"a secret of 27 bytes, given"


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*job_secret.VARIABLES, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(job_secret, "_held", None)
    monkeypatch.setattr(trust, "user_key", lambda: user_key([tmp_path / "private"]))


class Served:
    """What a member knows of a TCPStore: its address. Its contents are another store's."""

    def __init__(self, host: str, inner: Any = None) -> None:
        self.host, self.port = host, 1
        self.compare_set = (inner or dist.HashStore()).compare_set


@pytest.mark.parametrize("place", Place)
def test_a_secret_that_was_given_counts_wherever_the_store_is(place: Place) -> None:
    assert choose(has_secret=True, place=place) is Choice.GIVEN


def test_without_one_it_depends_on_where_the_store_is_alone() -> None:
    chosen = [choose(has_secret=False, place=each) for each in Place]
    assert chosen == [Choice.STORE, Choice.HOST, Choice.NONE]


@pytest.mark.parametrize(
    ("host", "world_size", "all_workers", "local", "expected"),
    [
        ("127.0.0.1", None, None, None, Place.HOST),
        ("localhost", 4, None, None, Place.HOST),
        ("::1", 4, None, None, Place.HOST),
        ("10.0.0.7", 4, None, None, Place.ELSEWHERE),
        ("10.0.0.7", 4, "4", "4", Place.HOST),
        ("10.0.0.7", 4, "4", "2", Place.ELSEWHERE),
        # A group that is larger than the job, or that others may join.
        ("10.0.0.7", 6, "4", "4", Place.ELSEWHERE),
        ("10.0.0.7", None, "4", "4", Place.ELSEWHERE),
    ],
)
def test_where_a_store_is(
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    world_size: int | None,
    all_workers: str | None,
    local: str | None,
    expected: Place,
) -> None:
    for name, value in (("WORLD_SIZE", all_workers), ("LOCAL_WORLD_SIZE", local)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert place_of(Served(host), world_size) is expected


def test_a_file_counts_as_private_if_nobody_else_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    path.touch(0o600)
    store = dist.PrefixStore("a", dist.FileStore(str(path), -1))
    assert place_of(store, None) is Place.PRIVATE
    path.chmod(0o644)
    assert place_of(store, None) is Place.HOST


def test_members_that_know_the_same_come_to_the_same() -> None:
    for host, given_secret in (("10.0.0.7", GIVEN), ("127.0.0.1", None)):
        store = Served(host)
        one, other = (agree(store, given_secret, 2) for _ in range(2))
        assert one == other
        assert one.seals == auth.SEALS()
    assert agree(dist.HashStore(), None, 2).secret != agree(dist.HashStore(), None, 2).secret


def test_the_store_of_a_host_holds_nothing_that_a_secret_follows_from() -> None:
    inner = dist.HashStore()
    found = agree(Served("127.0.0.1", inner), None, 2)
    assert inner.num_keys() == 1
    held = inner.get("job")
    assert found.secret.hex().encode() not in held
    assert found.secret not in held


def test_without_any_secret_there_is_one_loud_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = agree(Served("10.0.0.7"), None, 2)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    for words in ("run code as this user", "RALLY_SECRET", "rally secret", "insecure=True"):
        assert words in record.getMessage()
    assert found.seals == (auth.NONE,)
    caplog.clear()
    agree(Served("10.0.0.7"), None, 2, insecure=True)
    monkeypatch.setenv("RALLY_INSECURE", "1")
    agree(Served("10.0.0.7"), None, 2)
    assert not caplog.records


def test_a_member_that_chose_otherwise_is_told_both_choices() -> None:
    inner = dist.HashStore()
    agree(Served("10.0.0.7", inner), None, 2, insecure=True)
    with pytest.raises(RpcError) as caught:
        agree(Served("10.0.0.7", inner), GIVEN, 2)
    said = str(caught.value)
    assert "this one uses the secret that it was given (" in said
    assert "the first one no secret" in said
    assert "RALLY_SECRET" in said
    assert GIVEN.decode() not in said

    inner = dist.HashStore()
    agree(Served("127.0.0.1", inner), GIVEN, 2)
    with pytest.raises(RpcError, match="this one uses its user's key on its host"):
        agree(Served("127.0.0.1", inner), None, 2)
    with pytest.raises(RpcError, match=r"given \(\w{12}\), the first one the secret .* \(\w{12}\)"):
        agree(Served("127.0.0.1", inner), GIVEN + b"!", 2)


@pytest.mark.parametrize(
    "written", [b"x", b"a|NONE||00", b"a|b|c|d", b"\xff" * 99, b"|||", b"x" * 9999]
)
def test_whoever_writes_the_group_s_name_is_not_believed(written: bytes) -> None:
    inner = dist.HashStore()
    inner.set("job", written)
    with pytest.raises(RpcError, match=r"another program|do not share a secret"):
        agree(Served("127.0.0.1", inner), GIVEN, 2)


# -- what is signed ---------------------------------------------------------------------------------


@given(st.binary(max_size=50), st.integers(0, 400), st.integers(0, 7))
def test_what_was_altered_moved_or_is_another_group_s_is_none(
    content: bytes, at: int, bit: int
) -> None:
    signer = Signer(GIVEN, "group")
    value = signer.sign("rank/1", content)
    assert signer.read("rank/1", value) == content
    altered = bytearray(value)
    altered[at % len(value)] ^= 1 << bit
    assert signer.read("rank/1", bytes(altered)) is None
    assert signer.read("rank/1", value[: at % len(value)]) is None
    assert signer.read("rank/2", value) is None
    assert Signer(GIVEN, "another").read("rank/1", value) is None
    assert Signer(GIVEN + b"!", "group").read("rank/1", value) is None
    assert signer.read("rank/1", content) is None


# -- the key of a user ------------------------------------------------------------------------------


def _ask(folder: Path, _: int) -> bytes:
    return user_key([folder])


def test_all_processes_of_a_user_get_one_key_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    with multiprocessing.get_context("fork").Pool(4) as pool:
        keys = set(pool.starmap(_ask, [(folder, number) for number in range(16)]))
    assert len(keys) == 1
    assert len(keys.pop()) == 32
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (key,) = folder.iterdir()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_folder_that_others_may_have_prepared_is_not_used(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.mkdir(0o755)
    link = tmp_path / "link"
    (tmp_path / "elsewhere").mkdir(0o700)
    link.symlink_to(tmp_path / "elsewhere")
    open_key = tmp_path / "open_key"
    open_key.mkdir(0o700)
    (open_key / "key").write_bytes(bytes(32))
    (open_key / "key").chmod(0o644)
    short = tmp_path / "short"
    short.mkdir(0o700)
    (short / "key").touch(0o600)
    linked = tmp_path / "linked"
    linked.mkdir(0o700)
    (linked / "key").symlink_to("/dev/zero")
    bad = [wide, link, open_key, short, linked]
    with pytest.raises(ConfigError) as caught:
        user_key(bad)
    said = str(caught.value)
    for words in ("its mode is 0755", "not a folder", "others can read", "has 0 bytes"):
        assert words in said
    assert "RALLY_SECRET" in said
    assert len(user_key([*bad, tmp_path / "good"])) == 32


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_folder_of_another_user_s_is_not_used(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir(0o700)
    os.chown(taken, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        user_key([taken])
