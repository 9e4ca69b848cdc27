"""The kinds of messages between two agents, and the names that torch has for them."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What a frame is. Numbers are part of the protocol: append only."""

    # From the one that connected.
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
    # From the one that accepted.
    REPLY = 32
    NOTHING = 33
    FAILURE = 34
    ITEM = 35
    END = 36
    # There will be no answer: the caller has given the request up, or its time is over.
    GIVEN_UP = 37


# The same as plain numbers, for what is done with each message: an enum's member takes longer to find.
CALL, SCRIPT_CALL, STREAM = int(Kind.CALL), int(Kind.SCRIPT_CALL), int(Kind.STREAM)
REMOTE, SCRIPT_REMOTE = int(Kind.REMOTE), int(Kind.SCRIPT_REMOTE)
FETCH, SCRIPT_FETCH = int(Kind.FETCH), int(Kind.SCRIPT_FETCH)
CANCEL, CREDIT = int(Kind.CANCEL), int(Kind.CREDIT)
REPLY, NOTHING, FAILURE = int(Kind.REPLY), int(Kind.NOTHING), int(Kind.FAILURE)
ITEM, END, GIVEN_UP = int(Kind.ITEM), int(Kind.END), int(Kind.GIVEN_UP)
# Those that make a value, and a reference to it.
REMOTES = (REMOTE, SCRIPT_REMOTE)

# What `messages_to_fail` and `messages_to_delay` of torch's faulty agent call them.
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
FLAG_REFS = 2  # references, or shared GPU memory, are in it: it must be unpickled even if nobody wants it any more
FLAG_PACKED = 4  # arguments, or the result, that are tuples are ordinary tensors (tensors.pack)
FLAG_FOREIGN = 1  # the payload was made by a pickler that user code has put in place of ours
