"""A TCP proxy that fails on request: it delays, stalls, cuts and resumes.

It runs an event loop in one thread. What has been sent is never lost unless the connection is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator


class FaultProxy:
    """A TCP proxy at 127.0.0.1 that delays, holds and cuts connections when told to.

    Its thread runs until :meth:`close`.

    Args:
        target: host and port that connections are forwarded to.

    Attributes:
        port: the port it listens on.
        delay: seconds that data takes in each direction; may be set at any time.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.delay = 0.0  # seconds, in each direction
        self.port = 0
        self._flows: asyncio.Event
        self._writers: set[asyncio.StreamWriter] = set()
        self._refuses = False
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    # -- what tests ask for -----------------------------------------------------------------------

    def stall(self) -> None:
        """Let nothing pass from now on. Connections stay open, and new ones are accepted."""
        self._call(self._flows.clear)

    def cut(self) -> None:
        """Close every connection at once, and from now on each new one."""

        def cut() -> None:
            self._refuses = True
            for writer in self._writers:
                writer.transport.abort()

        self._call(cut)

    def resume(self) -> None:
        """Undo :meth:`stall` and :meth:`cut`. Held data passes now; connections that were cut stay closed."""

        def resume() -> None:
            self._refuses = False
            self._flows.set()

        self._call(resume)

    def close(self) -> None:
        """Close all connections and stop the thread. Blocks until the thread has ended."""
        self._call(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _call(self, function: Callable[[], object]) -> None:
        done = threading.Event()

        def call() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(call)
        assert done.wait(10)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._flows, self._stop = asyncio.Event(), asyncio.Event()
        self._flows.set()
        tasks: set[asyncio.Task[None]] = set()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports report it in the loop's next iteration

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._known(writer):
            if self._refuses:
                return
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
            except OSError:
                return
            with self._known(far_writer):
                pumps = [
                    asyncio.ensure_future(self._pump(reader, far_writer)),
                    asyncio.ensure_future(self._pump(far_reader, writer)),
                ]
                try:
                    await asyncio.gather(*pumps)
                finally:
                    for pump in pumps:
                        pump.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)

    @contextlib.contextmanager
    def _known(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: what comes in goes out in order, after the delay."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        deliver = asyncio.ensure_future(self._deliver(on_the_way, writer))
        try:
            while True:
                try:
                    data = await reader.read(65536)
                except ConnectionError:
                    data = b""
                on_the_way.put_nowait((self._loop.time() + self.delay, data))
                if not data:
                    await deliver
                    return
        finally:
            deliver.cancel()

    async def _deliver(
        self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            at, data = await on_the_way.get()
            await asyncio.sleep(max(0.0, at - self._loop.time()))
            await self._flows.wait()
            try:
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
                await writer.drain()
            except (ConnectionError, RuntimeError, OSError):
                return
