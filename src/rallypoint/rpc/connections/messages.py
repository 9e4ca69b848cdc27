"""The kinds of messages between two agents, and torch's names for them."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """The kind of a frame. Numbers are part of the protocol: append only."""

    # Sent by the end that connected.
    CALL = 1
    SCRIPT_CALL = 2
    REMOTE = 3
    SCRIPT_REMOTE = 4
    FETCH = 5
    SCRIPT_FETCH = 6
    STREAM = 7
    FORK_REQUEST = 8
    CHILD_ACCEPT = 9
    USER_DELETE = 10
    CANCEL = 11
    CREDIT = 12
    SEGMENT = 13
    LEAVE = 14
    INQUIRY = 15
    # Sent by the end that accepted.
    REPLY = 32
    NOTHING = 33
    FAILURE = 34
    ITEM = 35
    END = 36
    # No answer will follow: the caller cancelled the request, or it timed out.
    GIVEN_UP = 37


# As plain numbers, for code that runs per message: looking up an enum member is slower.
CALL, SCRIPT_CALL, STREAM = int(Kind.CALL), int(Kind.SCRIPT_CALL), int(Kind.STREAM)
REMOTE, SCRIPT_REMOTE = int(Kind.REMOTE), int(Kind.SCRIPT_REMOTE)
FETCH, SCRIPT_FETCH = int(Kind.FETCH), int(Kind.SCRIPT_FETCH)
CANCEL, CREDIT = int(Kind.CANCEL), int(Kind.CREDIT)
REPLY, NOTHING, FAILURE = int(Kind.REPLY), int(Kind.NOTHING), int(Kind.FAILURE)
ITEM, END, GIVEN_UP = int(Kind.ITEM), int(Kind.END), int(Kind.GIVEN_UP)
# Calls that create a remote value.
REMOTES = (REMOTE, SCRIPT_REMOTE)

# Their names in `messages_to_fail` and `messages_to_delay` of torch's faulty agent.
TORCH_NAMES: dict[Kind, str] = {
    Kind.CALL: "PYTHON_CALL",
    Kind.SCRIPT_CALL: "SCRIPT_CALL",
    Kind.REMOTE: "PYTHON_REMOTE_CALL",
    Kind.SCRIPT_REMOTE: "SCRIPT_REMOTE_CALL",
    Kind.FETCH: "PYTHON_RREF_FETCH_CALL",
    Kind.SCRIPT_FETCH: "SCRIPT_RREF_FETCH_CALL",
    Kind.FORK_REQUEST: "RREF_FORK_REQUEST",
    Kind.CHILD_ACCEPT: "RREF_CHILD_ACCEPT",
    Kind.USER_DELETE: "RREF_USER_DELETE",
}

# Flags of a frame.
FLAG_REFS = 2  # has references or shared GPU memory: must be unpickled even if the result is no longer wanted
FLAG_PACKED = 4  # arguments or result are a tuple of plain tensors (tensors.pack)
FLAG_TRACKED = 8  # part of a context of autograd, whose id is beside the content
FLAG_TRACED = 16  # headers of W3C Trace Context are beside the content
FLAG_FOREIGN = 1  # pickled by a pickler that user code installed
