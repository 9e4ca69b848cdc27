"""What a failure says about its origin: an error of its own, or only that a peer is gone.

When one worker of a job fails, its peers fail too, and often die earlier: their connections break while it is still
cleaning up. So failures are ranked by what they say (:class:`Says`), then by time.

The messages are those of Gloo, NCCL, TCPStore and sockets in torch 2.13, and of this package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from itertools import takewhile

from rallypoint._core.whole_writes import NOBODY_READS
from rallypoint.launch.torch_private import REMOTE_TRACEBACKS


class Says(IntEnum):
    """How much a failure says about the root cause, most first."""

    CAUSE = 0  # an error of its own
    MASKED = 1  # an error of its own, then a lost peer during cleanup
    HANDLED = 2  # stopped by us while handling an error of its own
    PRINTED = 3  # stopped by us after printing a traceback (of a thread, of a child)
    MISSING = 4  # names the rank that never arrived
    CONNECTION = 5  # a connection failed, perhaps to no peer at all
    TIMED_OUT = 6  # a peer did not arrive in time
    LEFT_EARLY = 7  # did not fail: its script ended while other ranks still needed it
    PEER_LOST = 8  # a peer closed its connection
    STOPPED = 9  # nothing: we stopped it


# One exception: the name of its type, and its message.
Link = tuple[str, str]
# From the last exception raised back to the first, its cause.
Chain = Sequence[Link]

_MISSING = re.compile(r"ranks? [\d, ]+ failed to pass monitoredBarrier", re.IGNORECASE)
_ACCUSED = (
    re.compile(r"ranks? (\d[\d, ]*) failed to pass monitoredBarrier", re.IGNORECASE),
    re.compile(r"CheckpointException ranks:dict_keys\(\[([\d, ]+)\]\)"),
)
_TIMED_OUT = re.compile(
    r"timed out waiting \d+ ?ms for (recv|send)|(gloo|nccl).*(timed out|timeout)|wait timeout after \d+ ?ms"
    r"|watchdog caught collective operation timeout|some nccl operations have failed or timed out"
    r"|socket (has )?timed? ?out|socket timeout|timed out after .* waiting for clients"
    r"|\b(tcp|file|hash|prefix)store\b.*(timed out|timeout)|rpc ran for more than set timeout",
    re.IGNORECASE | re.DOTALL,
)
_PEER_LOST = re.compile(
    r"closed by peer|remote (process|peer) (exited|closed|has terminated|is gone)"
    r"|ncclRemoteError|ncclSystemError|nccl communicator was aborted"
    r"|failed to (recv|send), got|connectFullMesh|recvValue failed|sendBytes failed|peer closed"
    r"|reached monitoredBarrier, but received errors"
    r"|socket (is )?(closed|not connected)|(gloo|pair\.cc).*(closed|reset|broken pipe|refused)"
    r"|application timeout caused pair closure",
    re.IGNORECASE | re.DOTALL,
)
_PEER_LOST_TYPES = {"torch.distributed.DistNetworkError", "torch.distributed.DistStoreError"}
_PEER_LOST_NAMES = {"PeerLost", "PeerLostError", "MembershipChanged"}
_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|failed to connect", re.IGNORECASE
)
_CONNECTION_TYPES = {"ConnectionResetError", "BrokenPipeError", "ConnectionRefusedError"}
_CONNECTION_TYPES |= {"ConnectionAbortedError", "ConnectionError"}
# Types that multi-process libraries raise, and text that only such a library produces, whatever type carries it. An error
# of another type that sounds like a lost peer comes from a client of a database or a web service, or from a setting.
_GENERAL_TYPES = {
    *("RuntimeError", "Exception", "SystemError", "C++ exception", "EOFError"),
    *("OSError", "ConnectionError", "TimeoutError", "socket.timeout"),
    *("multiprocessing.context.AuthenticationError", "multiprocessing.context.TimeoutError"),
} | _CONNECTION_TYPES
_PACKAGES = ("torch.", "rallypoint.", "c10.", "c10d.", "gloo.", "mpi4py.")
_OF_A_LIBRARY = re.compile(
    r"gloo/|pair\.cc|\bnccl[A-Z]\w+|nccl (error|operations)|ProcessGroup|monitoredBarrier|TCPStore|connectFullMesh"
    r"|watchdog caught collective"
)
# Programs handle these routinely while they wait or probe: nothing is wrong.
_ORDINARY = {
    *("queue.Empty", "_queue.Empty", "queue.Full", "StopIteration", "StopAsyncIteration", "KeyError"),
    *("TimeoutError", "BlockingIOError", "InterruptedError", "FileNotFoundError", "AttributeError"),
    *("GeneratorExit", "ImportError", "ModuleNotFoundError", "asyncio.exceptions.CancelledError"),
    *("KeyboardInterrupt", "SystemExit", "socket.timeout", "subprocess.TimeoutExpired"),
}  # fmt: skip


def says(link: Link) -> Says:
    """Classify one exception on its own."""
    kind, message = link
    if not (
        kind in _GENERAL_TYPES
        or kind.startswith(_PACKAGES)
        or kind.rpartition(".")[2] in _PEER_LOST_NAMES
        or _OF_A_LIBRARY.search(message)
    ):
        return Says.CAUSE
    if NOBODY_READS in message:
        return Says.CAUSE
    if _MISSING.search(message):
        return Says.MISSING
    if _TIMED_OUT.search(message):
        return Says.TIMED_OUT
    if kind in _PEER_LOST_TYPES or kind.rpartition(".")[2] in _PEER_LOST_NAMES:
        return Says.PEER_LOST
    if _PEER_LOST.search(message):
        return Says.PEER_LOST
    if kind in _CONNECTION_TYPES or _CONNECTION.search(message):
        return Says.CONNECTION
    if kind == "EOFError" and not message:
        return Says.CONNECTION
    return Says.CAUSE


def chain_says(chain: Chain) -> Says:
    """Classify an exception together with its causes.

    The first one raised decides: whatever follows a lost peer is a consequence of it, and so is a
    peer lost while an error is being handled.
    """
    links = [link for link in chain if link[0] not in REMOTE_TRACEBACKS]
    if not links:
        return Says.CAUSE
    first = says(links[-1])
    if first is Says.CAUSE and any(says(link) is not Says.CAUSE for link in links):
        return Says.MASKED
    return first


def best_chain(chains: Sequence[Chain]) -> Chain:
    """The most informative chain of an exception group."""
    return min(chains, key=chain_says, default=())


def telling(chain: Chain) -> Link | None:
    """The exception of a chain to show: the last one raised that is not just a symptom."""
    if not chain:
        return None
    if chain_says(chain) is Says.MASKED:
        return next(link for link in chain if says(link) is Says.CAUSE)
    return chain[0]


def is_ordinary(kind: str) -> bool:
    """Whether programs handle this exception routinely (an empty queue, a retry)."""
    return kind in _ORDINARY


def accused(message: str) -> frozenset[int]:
    """The ranks that a message blames."""
    found = (pattern.search(message) for pattern in _ACCUSED)
    return frozenset(
        int(number) for match in found if match for number in re.findall(r"\d+", match.group(1))
    )


# -- what was printed ------------------------------------------------------------------------------

_BEGINNING = "Traceback (most recent call last):"
_LAST_LINE = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
_ABORTED = re.compile(r"what\(\):\s*(.*)|caught collective operation timeout", re.IGNORECASE)


def printed(lines: Sequence[str]) -> Link | None:
    """The last exception in lines of stderr, from Python or C++, or None."""
    for start in range(len(lines) - 1, -1, -1):
        line = lines[start]
        if _ABORTED.search(line):
            return ("C++ exception", "\n".join(lines[start:]))
        if line.endswith(_BEGINNING):
            return _exception_after(lines[start + 1 :])
    # The traceback's first line may have been cut off: look for a frame.
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    return _exception_after(lines[frames[0] :]) if frames else None


def _exception_after(lines: Sequence[str]) -> Link | None:
    for index, line in enumerate(lines):
        if line.startswith((" ", "\t")):
            continue
        match = _LAST_LINE.fullmatch(line)
        if match is None:
            return None
        rest = list(
            takewhile(lambda line: not line.startswith("["), lines[index + 1 :])
        )  # torch's log
        return (match.group(1), "\n".join([match.group(2) or "", *rest]).strip())
    return None
