"""The sink for events: passes each reported event to every subscriber of this process.

Events are frozen records (:mod:`rallypoint.events` has all of them). ``emit`` calls the subscribers in the thread
that reports the event. Without subscribers it returns at once.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import re
import socket
import stat
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ClassVar, Self

from rallypoint.errors import ConfigError

from . import clock, env as environment, forks, private


_log = logging.getLogger(__name__)

VARIABLE = "RALLY_EVENTS"
# The variable's value for log lines instead of a file.
TO_LOG = "log"
# The version of the JSON records.
VERSION = 1
# Longer texts are cut, so that a record is small enough for one write.
LONGEST_TEXT = 2000

_WORD = re.compile(r"(?<!^)(?=[A-Z])")


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in this process. Subclasses add fields: text, numbers, booleans, None, tuples of them.

    Attributes:
        kind: the class's name in lower case, words separated by underscores.
    """

    kind: ClassVar[str] = "event"

    # slots=True creates each class twice; super() without arguments would refer to the first one.
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super(Event, cls).__init_subclass__(**kwargs)
        cls.kind = _WORD.sub("_", cls.__name__).lower()

    def fields(self) -> dict[str, Any]:
        """The record's fields.

        Returns:
            Their values by name.
        """
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}


Subscriber = Callable[[Event], object]


class Subscription:
    """A subscriber until :meth:`close`; also a context manager.

    Args:
        subscriber: called with each event.
        hub: the hub to leave on close.
    """

    def __init__(self, subscriber: Subscriber, hub: Hub) -> None:
        self._subscriber = subscriber
        self._hub = hub
        self._has_failed = False

    def deliver(self, event: Event) -> None:
        """Call the subscriber. Its first exception is logged, later ones are dropped: events never fail a job.

        Args:
            event: the event to deliver.
        """
        try:
            self._subscriber(event)
        except Exception:  # noqa: BLE001  code of the user
            if not self._has_failed:
                self._has_failed = True
                _log.warning(
                    "a subscriber to events failed at %s; later failures of it are not logged",
                    event.kind,
                    exc_info=True,
                )

    def close(self) -> None:
        """End the subscription. A second call does nothing."""
        self._hub.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Hub:
    """The subscriptions of this process."""

    def __init__(self) -> None:
        # Replaced as a whole under the lock, so that emit needs none. None: the environment has not been read yet.
        self._found: tuple[Subscription, ...] | None = None
        self._lock = forks.Lock()

    def subscribe(self, subscriber: Subscriber) -> Subscription:
        """Call ``subscriber`` with each event of this process until the subscription is closed.

        It runs in the thread that reports the event, which may hold a lock of this package: it must not block or call
        this package. Its first exception is logged, later ones are ignored. A forked child keeps the subscription.

        Args:
            subscriber: called with the event; its result is ignored.

        Returns:
            The subscription: close it, or use it as a context manager.
        """
        subscription = Subscription(subscriber, self)
        with self._lock:
            self._found = (*self._subscriptions(), subscription)
        return subscription

    def leave(self, subscription: Subscription) -> None:
        with self._lock:
            self._found = tuple(each for each in self._subscriptions() if each is not subscription)

    def is_wanted(self) -> bool:
        """Whether there are subscribers; ask before computing expensive fields.

        Returns:
            True if :func:`emit` would call a subscriber.
        """
        return bool(self._current())

    def emit(self, event: Event) -> None:
        """Report an event to all subscribers of this process. Never raises.

        Args:
            event: of one of this package's classes or your own.
        """
        for each in self._current():
            each.deliver(event)

    def _current(self) -> tuple[Subscription, ...]:
        found = self._found
        if found is None:
            with self._lock:
                found = self._found = self._subscriptions()
        return found

    def _subscriptions(self) -> tuple[Subscription, ...]:
        """The current subscriptions; initially those from the environment. Called under the lock."""
        if self._found is not None:
            return self._found
        try:
            sink = sink_of(environment.get(VARIABLE) or "")
        except ConfigError as error:
            _log.warning("no events are written: %s", error)
            sink = None
        return () if sink is None else (Subscription(sink, self),)


_hub = Hub()
subscribe, emit, is_wanted = _hub.subscribe, _hub.emit, _hub.is_wanted


# -- sinks --------------------------------------------------------------------------------------------


def sink_of(value: str) -> Subscriber | None:
    """The subscriber for a value of ``RALLY_EVENTS``: ``log`` or a file's path; None if empty.

    Raises:
        ConfigError: the file cannot be opened.
    """
    if not value:
        return None
    return log_event if value == TO_LOG else JsonLines(value)


def check(env: Mapping[str, str]) -> None:
    """Check the sink that ``RALLY_EVENTS`` names, if any.

    Raises:
        ConfigError: the file cannot be appended to.
    """
    sink_of(env.get(VARIABLE, ""))


def for_workers(env: dict[str, str]) -> dict[str, str]:
    """The environment for workers, with an absolute path, because their working directory may differ."""
    value = env.get(VARIABLE)
    if value and value != TO_LOG:
        env = {**env, VARIABLE: os.path.abspath(value)}
    return env


def log_event(event: Event) -> None:
    """Log an event as one INFO line of the logger ``rallypoint.events``."""
    shown = " ".join(f"{name}={value!r}" for name, value in event.fields().items())
    logging.getLogger("rallypoint.events").info("%s %s", event.kind, shown)


class JsonLines:
    """Appends events to a file, one JSON object per line. Processes of a host may share the file.

    A line has ``version``, ``kind``, ``time`` (seconds since 1970, by the clock of ``host``), ``monotonic`` (seconds, by
    the monotonic clock of ``host``), ``host``, ``pid``, and the fields of the event. The file is opened for each
    event, so a script cannot close it, and it may be moved at any time.

    Args:
        path: the file's path. ``{host}`` and ``{pid}`` are replaced. A missing file is created with mode 0600.

    Raises:
        ConfigError: it cannot be opened for appending.
    """

    def __init__(self, path: str) -> None:
        self._has_failed = False
        self._host = socket.gethostname()
        # Absolute, because a script may change its working directory.
        self._path = os.path.abspath(path.replace("{host}", self._host))
        try:
            os.close(self._open())
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(VARIABLE, path, f"cannot append to this file: {why}") from None

    def __call__(self, event: Event) -> None:
        record = {
            "version": VERSION,
            "kind": event.kind,
            "time": round(clock.wall(), 6),
            "monotonic": round(clock.MONOTONIC.now(), 6),
            "host": self._host,
            "pid": os.getpid(),
            **{name: _short(value) for name, value in event.fields().items()},
        }
        try:
            self._append(json.dumps(record).encode() + b"\n")
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                why = error.strerror or str(error)
                _log.warning(
                    "%s: cannot append to %s: %s; it lacks events", VARIABLE, self._path, why
                )

    def _append(self, line: bytes) -> None:
        fd = self._open()
        try:
            # One call: the kernel appends it whole, so lines of several processes do not mix.
            os.write(fd, line)
        finally:
            os.close(fd)

    def _open(self) -> int:
        path = self._path.replace("{pid}", str(os.getpid()))
        # A FIFO without a reader would block.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, private.FILE)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")
        return fd


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return value[:LONGEST_TEXT] + "…"
    return value
