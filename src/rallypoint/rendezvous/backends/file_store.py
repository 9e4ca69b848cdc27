"""A store in a folder that all nodes share, for clusters that allow nothing else.

Theory of operation
-------------------
Each key is a folder of numbered files, its *entries*; the highest-numbered entry is what the key holds, and no
entry ever changes. To change a key, a writer makes a temporary file in its folder, lists the folder, reads
the highest entry N, writes the value that follows from it and links the temporary file to N+1. ``link`` fails if
the name is taken, so of several writers one succeeds and the others start again. Every operation that
writes works this way, each with its own rule for the next value, so all are atomic among each other. An entry
may say "deleted". A new key appears as a whole folder with entry 1 in it, by one ``rename``, which fails
on a key that exists. The store relies only on ``open`` with ``O_EXCL``, ``link``, ``rename``, ``mkdir``, ``symlink``
and removals, which a file server carries out one after the other: no locks, no appending.

[Note: Compaction] Old entries are removed; otherwise a counter would keep a file for every ``add``. A writer
that listed the folder long ago must not find N+1 free because it was removed. So a writer that removes
entries below its own entry M first lists the folder once more and removes all temporary files.
Another writer whose temporary file was there can no longer link it, and starts again; one that comes later lists
the folder after M existed. Entries are removed in ascending order: a reader whose listing missed the newest
entries (listing is not atomic) finds that the entry it chose is gone, and looks again. After a deletion, the
folder itself is removed; a folder without entries is a deleted key, and no writer links into it.
All this happens through a descriptor of the folder, because its path may by now lead to a newer folder.

[Note: NFS] A client caches listings and failed look-ups for up to a minute. It drops what it has cached of a
folder when it changes that folder itself. So on a file system that is not known to be
local, every look first makes and removes a link in the folder; a writer's temporary file has the same effect.
No mount option is needed; ``actimeo`` and ``lookupcache`` make no difference. The answer to a ``link`` or
``rename`` can get lost, and then the retry fails; so after an error we check whether the entry is ours (each has
its own mark). Values are flushed to the server before they get their name.

What remains: mount ``hard`` (the default), or an overloaded server causes I/O errors. A server that is
exported ``async`` and crashes may forget entries. If an answer is lost and the entry is compacted before
we look, the change is made twice. All clients of a folder must use the same file system: a synchronised copy
(rsync, a cloud drive) will not do. N concurrent callers of one key need up to N attempts each.

[Note: Waiting] This is the only backend that has to poll: a file server does not announce a
change made by another host. Looks are 5 ms apart at first, later 200 ms; closing interrupts a wait.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import pwd
import random
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from rallypoint._core.clock import Deadline
from rallypoint.errors import ConfigError, RendezvousConnectionError


# Seconds between two looks for a missing key.
FIRST_LOOK, LONGEST_LOOK = 0.005, 0.2
# Seconds before retrying an attempt that another writer foiled; a random part of this is used.
FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
# Only successful writers foil an attempt: if every attempt fails for this long (seconds), something else is wrong.
PATIENCE = 60.0
# A handle is stale when the folder was replaced on the server; if it stays stale, the mount is broken.
STALE_TRIES = 5
PASSING = {errno.ESTALE, errno.EINTR}
# Errors that waiting does not change.
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT}
)
FULL = {errno.ENOSPC, errno.EDQUOT}
# After this many entries of a key, the older ones are removed except for a few that readers may already have
# chosen. Large ones are not kept at all.
COMPACT_EVERY, KEPT, LARGE = 32, 8, 4096
# A file name has at most 255 bytes everywhere.
MAX_NAME = 255
KEY, HASHED, TEMPORARY = "rally-key.", "rally-hash.", "rally-tmp."
# File systems of a single host, whose changes all processes see at once.
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay"}
OWN_FOLDER = "give a folder of the job's own: it is made if missing, with access for you alone"

_T = TypeVar("_T")
_RANDOM = random.SystemRandom()


class FileStore:
    """Implements :class:`~rallypoint.rendezvous.store.ComparingStore` in a folder; thread-safe.

    Nothing is held open between operations.

    Args:
        folder: the job's folder, on a file system that all nodes share; made with mode 0700 if missing. It must
            belong to the user that all nodes run as, and must not be world-writable: even with
            the sticky bit, others could put keys there. Whether it is group-writable is the user's decision.
        shared: whether other hosts may change it (see [Note: NFS]); None finds out.

    Raises:
        ConfigError: the folder cannot be made, written to, or trusted.
        RendezvousConnectionError: the disk is full, or fails.
    """

    def __init__(self, folder: str | os.PathLike[str], shared: bool | None = None) -> None:
        self._folder = os.path.abspath(folder)
        self._closed = threading.Event()
        _make(self._folder)
        self._shared = not _is_local(self._folder) if shared is None else shared

    def set(self, key: str, value: bytes) -> None:
        self._change(key, "set", lambda _: _Entry(value))

    def get(self, key: str, timeout: float) -> bytes:
        deadline, pause = Deadline(timeout), FIRST_LOOK
        while True:
            value = self.get_many([key])[0]
            if value is not None:
                return value
            left = deadline.remaining() or 0.0
            if left == 0.0:
                raise TimeoutError(f"no key {key!r} within {timeout:g} s")
            self._closed.wait(min(pause, left))
            pause = min(pause * 2, LONGEST_LOOK)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """As in the interface, but each key that exists costs a few operations of its own."""
        if keys:
            self._until_settled("read", self._refresh)
        return [self._until_settled(f"read {key!r}", partial(self._look, key)) for key in keys]

    def peek(self, key: str) -> bytes | None:
        return self.get_many([key])[0]

    def add(self, key: str, amount: int) -> int:
        def next_entry(held: bytes | None) -> _Entry:
            return _Entry(str(int(held or b"0") + amount).encode())

        return int(self._change(key, "add to", next_entry).held or b"0")

    def put_new(self, key: str, value: bytes) -> bytes:
        result = self._change(key, "set", lambda held: _Entry(value) if held is None else None)
        return result.held or b""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """See :class:`~rallypoint.rendezvous.store.ComparingStore`."""

        def next_entry(held: bytes | None) -> _Entry | None:
            return _Entry(desired) if (held or b"") == expected else None

        held = self._change(key, "set", next_entry).held
        return expected if held is None else held

    def exists(self, key: str) -> bool:
        return self.get_many([key])[0] is not None

    def delete(self, key: str) -> bool:
        return self._change(
            key, "delete", lambda held: None if held is None else _Entry(None)
        ).written

    def clone(self) -> FileStore:
        other = copy.copy(self)
        other._closed = threading.Event()  # noqa: SLF001  # of this class
        return other

    def close(self) -> None:
        """End this connection's waits; its operations raise ``RendezvousConnectionError`` from now on."""
        self._closed.set()

    def remove(self) -> None:
        """Delete the whole store when the last node leaves; other files in the folder stay.

        Raises:
            RendezvousConnectionError: a part of it could not be deleted.
        """
        for _ in range(STALE_TRIES):  # another process may be writing or removing it
            try:
                self._refresh()
                names = os.listdir(self._folder)
                ours = [name for name in names if name.startswith((KEY, HASHED, TEMPORARY))]
                for name in ours:
                    _remove_tree(os.path.join(self._folder, name))
                os.rmdir(self._folder)
                return
            except FileNotFoundError:
                return
            except OSError as error:
                last = error
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY) and not ours:
                    return  # what is left is not ours, or the folder is a mount point
        raise self._failed("be removed", last)

    def age(self, key: str) -> float:
        """Seconds since a key was set, by the clock of the server that holds the folder.

        Raises:
            RendezvousConnectionError: there is no such key, or the folder cannot be used.
        """
        try:
            changed = _changed(self._path(key))
            with tempfile.TemporaryFile(dir=self._folder) as probe:
                return os.fstat(probe.fileno()).st_mtime - changed
        except OSError as error:
            raise self._failed("be looked at", error) from None
        except IndexError:  # the key is being removed
            raise RendezvousConnectionError(f"{key!r} is not in {self._folder}") from None

    # -- one look, one change ---------------------------------------------------------------------

    def _look(self, key: str) -> bytes | None:
        """One look at a key. Raises _Foiled or FileNotFoundError if it changed at the same time."""
        path = self._path(key)
        try:
            fd = _open_folder(path)
        except FileNotFoundError:
            return None
        try:
            if self._shared:
                _forget(fd)
            numbers = _numbers(os.listdir(fd))
            if not numbers:
                _bury(fd, path)
                raise _Foiled
            return _read(fd, numbers[-1]).value
        finally:
            os.close(fd)

    def _change(
        self, key: str, operation: str, next_entry: Callable[[bytes | None], _Entry | None]
    ) -> _Result:
        """Put the entry that follows from what the key holds; if ``next_entry`` returns None, leave the key as it is."""
        return self._until_settled(
            f"{operation} {key!r}", lambda: self._change_once(self._path(key), next_entry)
        )

    def _change_once(
        self, path: str, next_entry: Callable[[bytes | None], _Entry | None]
    ) -> _Result:
        try:
            fd = _open_folder(path)
        except FileNotFoundError:
            entry = next_entry(None)
            if entry is not None:
                self._create(path, entry)
                return _Result(True, entry.value)
            self._refresh()
            if os.path.lexists(path):
                raise _Foiled from None  # the client had cached that the key did not exist
            return _Result(False, None)
        mark = _new_mark()
        temporary = TEMPORARY + mark
        try:
            # Before the listing: see [Note: Compaction].
            file = _create_file(fd, temporary)
            try:
                try:
                    numbers = _numbers(os.listdir(fd))
                    if not numbers:
                        _bury(fd, path)
                        raise _Foiled
                    held = _read(fd, numbers[-1]).value
                    entry = next_entry(held)
                    if entry is None:
                        return _Result(False, held)
                    _write(file, mark, entry, self._shared)
                finally:
                    os.close(file)
                number = numbers[-1] + 1
                _link(fd, temporary, number, mark)
            finally:
                _unlink_quietly(fd, temporary)
            self._tidy(fd, path, number, held, entry)
            return _Result(True, entry.value)
        finally:
            os.close(fd)

    def _create(self, path: str, entry: _Entry) -> None:
        """Create a key with its first entry. Raises _Foiled if another process did."""
        mark = _new_mark()
        temporary = os.path.join(self._folder, TEMPORARY + mark)
        os.mkdir(temporary, 0o700)
        fd, rubbish = _open_folder(temporary), True
        try:
            file = _create_file(fd, "1")
            try:
                _write(file, mark, entry, self._shared)
            finally:
                os.close(file)
            rubbish = False  # whatever the answer, the folder may be the key from now on
            try:
                os.rename(temporary, path)
            except OSError as error:
                self._refresh()
                rubbish = not _is_folder(fd, path)
                if rubbish:
                    taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
                    raise (_Foiled() if taken else error) from None
        finally:
            if rubbish:
                _unlink_quietly(fd, "1")
                _rmdir_quietly(temporary)
            os.close(fd)

    def _tidy(self, fd: int, path: str, number: int, held: bytes | None, entry: _Entry) -> None:
        """Remove what our entry ``number`` has superseded. Never raises, because the change itself is done."""
        try:
            if entry.value is None:
                _compact(fd, number)
                os.unlink(str(number), dir_fd=fd)
                os.rmdir(path)
            elif max(len(held or b""), len(entry.value)) > LARGE:
                _compact(fd, number)
            elif number % COMPACT_EVERY == 0:
                _compact(fd, number - KEPT + 1)
        except OSError:
            pass  # the next writer will remove it

    # -- retries and errors -----------------------------------------------------------------------

    def _until_settled(self, operation: str, attempt: Callable[[], _T]) -> _T:
        """Repeat attempts that other writers foil; errors of the file system become connection errors."""
        deadline, pause, stale = Deadline(PATIENCE), FIRST_PAUSE, 0
        while not self._closed.is_set():
            try:
                return attempt()
            except (_Foiled, FileNotFoundError):
                stale = 0
                if not os.path.isdir(self._folder):
                    raise self._failed(operation, "the folder was removed") from None
                if deadline.expired():
                    raise self._failed(
                        operation, f"other writers have prevented it for {PATIENCE:g} s"
                    ) from None
            except RendezvousConnectionError:
                raise
            except OSError as error:
                stale += 1
                if error.errno not in PASSING or stale > STALE_TRIES:
                    raise self._failed(operation, error) from None
            self._closed.wait(_RANDOM.uniform(0, pause))
            pause = min(pause * 2, LONGEST_PAUSE)
        raise RendezvousConnectionError(f"this connection to the store in {self._folder} is closed")

    def _refresh(self) -> None:
        """Make the client forget which keys it has cached, or notice that the folder is gone."""
        if not self._shared:
            os.stat(self._folder)
            return
        fd = _open_folder(self._folder)
        try:
            _forget(fd)
        finally:
            os.close(fd)

    def _failed(self, operation: str, why: OSError | str) -> RendezvousConnectionError:
        return _connection_error(self._folder, operation, why)

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, _file_name(key))


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a key holds; ``value`` is None if the key was deleted."""

    value: bytes | None
    mark: str = ""


@dataclass(frozen=True, slots=True)
class _Result:
    """Whether an entry was written, and what the key holds now."""

    written: bool
    held: bytes | None


class _Foiled(Exception):
    """Another process changed the key at the same time: try again."""


def _file_name(key: str) -> str:
    # With the prefix, "", "." and ".." have no special meaning.
    name = KEY + quote(key, safe="", errors="surrogatepass")
    if len(name) <= MAX_NAME:
        return name
    return HASHED + hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def _new_mark() -> str:
    return os.urandom(12).hex()


def _open_folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _create_file(fd: int, name: str) -> int:
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=fd)


def _numbers(names: Sequence[str]) -> list[int]:
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _write(file: int, mark: str, entry: _Entry, flush: bool) -> None:
    kind, value = ("deleted", b"") if entry.value is None else ("value", entry.value)
    left = memoryview(f"{mark} {kind} {len(value)}\n".encode() + value)
    while left:
        left = left[os.write(file, left) :]
    if flush:
        os.fsync(file)


def _read(fd: int, number: int) -> _Entry:
    with open(
        os.open(str(number), os.O_RDONLY | os.O_CLOEXEC, dir_fd=fd), "rb", buffering=0
    ) as file:
        head, _, value = file.readall().partition(b"\n")
    words = head.decode(errors="replace").split(" ")
    if len(words) != 3 or words[2] != str(len(value)):
        # Entries get their names when they are complete, so only a server crash can lose a part.
        raise OSError(errno.EIO, f"entry {number} is damaged")
    mark, kind, _ = words
    return _Entry(None if kind == "deleted" else value, mark)


def _link(fd: int, temporary: str, number: int, mark: str) -> None:
    """Give a temporary file its number. Raises _Foiled if the number is taken, or the file was removed."""
    try:
        os.link(temporary, str(number), src_dir_fd=fd, dst_dir_fd=fd)
    except OSError as error:
        # The link may be made, with only the answer lost. The link count does not tell: the temporary file
        # may have been removed since.
        try:
            if _read(fd, number).mark == mark:
                return
        except OSError:
            pass  # then the first error counts
        if error.errno in (errno.EEXIST, errno.ENOENT):
            raise _Foiled from None
        raise


def _compact(fd: int, below: int) -> None:
    """Remove the entries below a number that is taken; see [Note: Compaction].

    Stops at the first error, because nothing may be removed before what precedes it in this order.
    """
    names = os.listdir(fd)
    for name in names:
        if name.startswith(TEMPORARY):
            _unlink(fd, name)
    for number in _numbers(names):
        if number < below:
            _unlink(fd, str(number))


def _bury(fd: int, path: str) -> None:
    """Remove the folder of a deleted key. If a listing missed an entry, the key exists, and the removal fails."""
    for name in os.listdir(fd):
        if not _numbers([name]):  # including .nfs* files of clients that are gone
            _unlink_quietly(fd, name)
    _rmdir_quietly(path)


def _forget(fd: int) -> None:
    """Make an NFS client ask its server about a folder again; see [Note: NFS]."""
    name = TEMPORARY + _new_mark()
    try:
        os.symlink("look", name, dir_fd=fd)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return  # reading goes on, a little late
    _unlink_quietly(fd, name)


def _unlink(fd: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        pass  # other writers remove files, too


def _unlink_quietly(fd: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except OSError:
        pass  # it is gone, or will be removed with the rest


def _rmdir_quietly(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # it is in use again, or will be removed with the rest


def _changed(path: str) -> float:
    """When a key got its value. The folder's own time will not do: on a network file system, a look changes it."""
    fd = _open_folder(path)
    try:
        return os.stat(str(_numbers(os.listdir(fd))[-1]), dir_fd=fd).st_mtime
    finally:
        os.close(fd)


def _is_folder(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_tree(path: str) -> None:
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass  # another process removes it, too


def _make(folder: str) -> None:
    """Make the folder if it is missing, and check that it is usable; see :class:`FileStore`."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _refusal(
            folder, "is not a folder, or a part of its path is not", OWN_FOLDER
        ) from None
    except OSError as error:
        if error.errno in _REFUSED:
            raise _refusal(folder, f"cannot be made: {error.strerror}", OWN_FOLDER) from None
        raise _connection_error(folder, "be made", error) from None
    try:
        held = os.stat(folder)
    except OSError as error:
        raise _connection_error(folder, "be looked at", error) from None
    try:
        ours = _try_out(folder)
    except PermissionError as error:
        problem = f"cannot be written to: {error.strerror} (it belongs to {_user(held.st_uid)})"
        raise _refusal(folder, problem, OWN_FOLDER) from None
    except OSError as error:
        if error.errno == errno.EROFS:
            problem = "cannot be written to: its file system is mounted read-only"
            raise _refusal(folder, problem, OWN_FOLDER) from None
        raise _connection_error(folder, "be written to", error) from None
    # Compare with the owner of a file of ours, not with our uid: a server may map users (root_squash).
    if held.st_uid != ours.st_uid:
        problem = f"belongs to {_user(held.st_uid)}, and the files of this process to {_user(ours.st_uid)}"
        raise _refusal(folder, problem, f"run all nodes as one user, and {OWN_FOLDER}")
    if held.st_mode & stat.S_IWOTH:
        problem = "everyone can write to it, and could control this job"
        raise _refusal(folder, problem, f"chmod o-w {folder}, or {OWN_FOLDER}")


def _try_out(folder: str) -> os.stat_result:
    """Make a file there and a hard link to it; return the file's stat result."""
    name = TEMPORARY + _new_mark()
    fd = _open_folder(folder)
    try:
        file = _create_file(fd, name)
        try:
            try:
                os.link(name, name + ".link", src_dir_fd=fd, dst_dir_fd=fd)
            except OSError as error:
                if error.errno in FULL | {errno.EIO}:
                    raise
                problem = f"its file system has no hard links: {error.strerror}"
                raise _refusal(folder, problem, "give a folder on another one, as NFS") from None
            return os.fstat(file)
        finally:
            os.close(file)
            _unlink_quietly(fd, name + ".link")
            _unlink_quietly(fd, name)
    finally:
        os.close(fd)


def _is_local(folder: str) -> bool:
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            for line in mounts:  # "36 35 98:0 /root /mount options - type source options"
                words = line.split(" ")
                if words[2] == wanted:
                    return words[words.index("-") + 1] in LOCAL
    except OSError:
        pass  # without /proc, nothing is known
    return False


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid {uid}"


def _refusal(folder: str, problem: str, hint: str) -> ConfigError:
    return ConfigError("store folder", folder, problem, hint)


def _connection_error(folder: str, operation: str, why: OSError | str) -> RendezvousConnectionError:
    cause = why if isinstance(why, str) else why.strerror or str(why)
    hint = ""
    if isinstance(why, OSError) and why.errno in FULL:
        hint = "; make room there, or raise the quota"
    elif isinstance(why, OSError) and why.errno in PASSING | {errno.EIO, errno.ETIMEDOUT}:
        hint = "; is the file server up, and the folder still mounted?"
    return RendezvousConnectionError(
        f"the job's store in {folder} cannot {operation}: {cause}{hint}"
    )
