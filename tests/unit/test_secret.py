"""Where a secret is found, which secrets are refused, and the keys derived from one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rallypoint._core import secret
from rallypoint.errors import ConfigError


LONG = b"correct horse battery staple"
PARTS = st.lists(
    st.one_of(st.text(max_size=8), st.binary(max_size=8), st.integers(0, 99)), max_size=4
)


@pytest.fixture(autouse=True)
def _nothing_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in secret.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = secret._held
    secret.hold(None)
    yield
    secret.hold(before)


def file_with(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(data)
    path.chmod(mode)
    return path


# RFC 5869, appendix A.1 to A.3: material, salt, info, length, key, output.
RFC_5869 = [
    (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        42,
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        82,
        "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        "0b" * 22,
        "",
        "",
        42,
        "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]


@pytest.mark.parametrize(("material", "salt", "info", "length", "key", "output"), RFC_5869)
def test_hkdf_gives_the_vectors_of_rfc_5869(
    material: str, salt: str, info: str, length: int, key: str, output: str
) -> None:
    found = secret.extract(bytes.fromhex(salt), bytes.fromhex(material))
    assert found.hex() == key
    assert secret.expand(found, bytes.fromhex(info), length).hex() == output


@given(PARTS, PARTS)
def test_keys_of_two_contexts_differ(
    one: list[str | bytes | int], other: list[str | bytes | int]
) -> None:
    same = one == other
    assert (secret.derive(LONG, "test", *one) == secret.derive(LONG, "test", *other)) is same
    assert secret.derive(LONG, "test", *one) != secret.derive(LONG, "another", *one)
    assert len(secret.derive(LONG, "test", *one)) == 32


def test_a_file_must_be_readable_by_its_owner_alone(tmp_path: Path) -> None:
    assert secret.read_file(file_with(tmp_path, b"  " + LONG + b"\n"), "--secret-file") == LONG
    for mode in (0o644, 0o640, 0o620, 0o604, 0o602, 0o666):
        path = file_with(tmp_path, LONG, mode)
        with pytest.raises(ConfigError) as caught:
            secret.read_file(path, "--secret-file")
        words = str(caught.value)
        for expected in ("--secret-file", str(path), f"{mode:04o}", f"chmod 600 {path}"):
            assert expected in words
        assert LONG.decode() not in words


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = file_with(tmp_path, LONG)
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        secret.read_file(path, "--secret-file")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user")
def test_a_file_of_root_may_be_readable_by_the_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 1:
            parent.chmod(parent.stat().st_mode | 0o011)
    path = file_with(tmp_path, LONG, 0o440)
    os.chown(path, 0, 65534)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([65534])
            os.setgid(65534)
            os.setuid(65534)
            code = 0 if secret.read_file(path, "--secret-file") == LONG else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "has 0 bytes"),
        (b"x\n", "has 1 bytes"),
        (b"fifteen bytes..\n", "has 15 bytes"),
        (b"x" * 100_000, "longer than"),
    ],
)
def test_what_is_no_secret_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        secret.read_file(file_with(tmp_path, data), "--secret-file")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "Is a directory|is a folder"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            secret.read_file(path, "RALLY_SECRET_FILE")
        assert str(path) in str(caught.value)


def test_argument_then_variable_then_file_then_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert secret.find() is None
    fd = secret.descriptor(b"over a descriptor it came")
    try:
        monkeypatch.setenv("RALLY_SECRET_FD", str(fd))
        assert secret.find() == b"over a descriptor it came"
        secret.hold(b"held in memory by forks")
        assert secret.find() == b"held in memory by forks"
        path = file_with(tmp_path, b"from the file, and not longer")
        monkeypatch.setenv("RALLY_SECRET_FILE", str(path))
        assert secret.find() == b"from the file, and not longer"
        monkeypatch.setenv("RALLY_SECRET", "from the variable")
        assert secret.find() == b"from the variable"
        assert secret.find("from the argument") == b"from the argument"
    finally:
        os.close(fd)


@pytest.mark.parametrize("text", ["", "short"])
def test_a_variable_without_a_secret_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RALLY_SECRET", text)
    secret.hold(LONG)
    with pytest.raises(ConfigError, match="RALLY_SECRET"):
        secret.find()
    with pytest.raises(ConfigError, match="mine"):
        secret.find(text, "mine")


def test_a_descriptor_reaches_programs_that_inherit_it_and_their_forks() -> None:
    code = """if True:
        import os
        from rallypoint._core import secret
        if os.fork() == 0:
            os._exit(0 if secret.held() == b"correct horse battery staple" else 1)
        assert os.wait()[1] == 0
        assert secret.held() == b"correct horse battery staple"
        fd = int(os.environ["RALLY_SECRET_FD"])
        try:
            os.write(fd, b"x")
        except PermissionError:
            pass
        else:
            raise AssertionError("could be changed")
    """
    fd = secret.descriptor(LONG)
    try:
        env = {**os.environ, "RALLY_SECRET_FD": str(fd)}
        subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[fd], check=True)
    finally:
        os.close(fd)


def test_a_number_that_stands_for_something_else_is_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in between closed it; in the child, the number belongs to another file."""
    with file_with(tmp_path, LONG).open("rb") as file:
        for number in (str(file.fileno()), "9999", "-1", "x", ""):
            monkeypatch.setenv("RALLY_SECRET_FD", number)
            assert secret.held() is None


def test_errors_do_not_show_what_was_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        secret.check("tooshort", "secret")
    assert "tooshort" not in str(caught.value) + repr(caught.value)


def test_a_fingerprint_says_nothing_but_which() -> None:
    assert secret.fingerprint(LONG) == secret.fingerprint(LONG) != secret.fingerprint(LONG + b"x")
    assert len(secret.fingerprint(LONG)) == 12
