"""A node's answer to another one, as a record in the job's store. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from rallypoint._core import flight_records


# The most bytes of an answer, unpacked.
MAX_ANSWER: Final = 64 * 1024 * 1024
# The numbers in a record of what a worker uses.
_USED: Final = ("cpu", "memory", "threads", "children", "read", "written", "at")
# The numbers in what a node says about its job.
_OF_JOBS: Final = ("pid", "nodes", "world_size", "restarts", "max_restarts")
# The sizes in bytes in a record of its memory, and in that of a device.
_SIZES: Final = ("rss", "pss", "shared", "private", "swap", "huge")
_OF_DEVICES: Final = (
    *("allocated", "most_allocated", "reserved", "segments", "free", "largest_free"),
)


def key(generation: int, name: str, node_rank: int) -> str:
    """The key of a node's answer to a question.

    Args:
        generation: the generation of both nodes.
        name: the question's name.
        node_rank: the rank of the node that answers.
    """
    return f"{generation}/answer/{name}/{node_rank}"


def pack(body: Mapping[str, Any]) -> dict[str, Any]:
    """An answer as a record. Compressed: the stacks of a hundred workers are more than a record may hold."""
    return {"zlib": base64.b64encode(zlib.compress(json.dumps(body).encode())).decode()}


def processes(body: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The records of workers in an answer; anything else is left out."""
    found = (body or {}).get("processes")
    records = found if isinstance(found, list) else []
    return [each for each in records if isinstance(each, dict) and _is_record(each)]


def status(body: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a node says about the job in an answer; None if it says nothing that can be read."""
    found = (body or {}).get("status")
    return found if isinstance(found, dict) and _is_status(found) else None


def ended(body: Mapping[str, Any] | None) -> set[int]:
    """The ranks of workers that have ended, in an answer."""
    found = (body or {}).get("ended")
    return {each for each in found if type(each) is int} if isinstance(found, list) else set()


def _is_status(status: Mapping[str, Any]) -> bool:
    texts = [status.get(name) for name in ("id", "host", "state", "target")]
    numbers = [status.get(name) for name in _OF_JOBS]
    known_later = (status.get("node_rank"), status.get("generation"))
    parts = (status.get("workers"), status.get("spares"))
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int for number in numbers)
        and all(number is None or type(number) is int for number in known_later)
        and isinstance(status.get("seconds"), int | float)
        and isinstance(status.get("args"), list)
        and all(isinstance(part, list) and all(map(_is_process, part)) for part in parts)
        and _is_progress(status.get("progress"))
    )


def _is_process(each: object) -> bool:
    return isinstance(each, dict) and isinstance(each.get("state"), str)


def _is_record(each: Mapping[str, Any]) -> bool:
    if type(each.get("rank")) is not int or type(each.get("pid")) is not int:
        return False
    threads = each.get("threads")
    if isinstance(threads, list):  # its stacks
        texts = (each.get("name"), each.get("why"), each.get("host"))
        told = each.get("collectives")
        return (
            all(isinstance(text, str) for text in texts)
            and all(map(_is_thread, threads))
            and (told is None or flight_records.are_valid(told))
            and isinstance(each.get("calls"), int | float | None)
        )
    if "trace" in each:
        texts = (each.get("packed"), each.get("why"), each.get("host"))
        # A path on another host means nothing here.
        return (
            each["trace"] == ""
            and all(isinstance(text, str) for text in texts)
            and flight_records.are_entered(each.get("entered"))
            and isinstance(each.get("whole"), bool)
            and isinstance(each.get("clock"), str)
        )
    if "mappings" in each:  # its memory
        return _is_memory(each)
    numbers = [each.get(name) for name in _USED]  # what it uses
    return (
        all(isinstance(number, int | float) for number in numbers)
        and isinstance(each.get("collectives"), int | None)
        and _is_progress(each.get("progress"))
        and _is_slowness(each.get("slowness"))
        and isinstance(each.get("state"), str)
        and isinstance(each.get("host"), str)
    )


def _is_memory(each: Mapping[str, Any]) -> bool:
    texts = (each.get("name"), each.get("why"), each.get("host"))
    parts = (each.get("mappings"), each.get("shared_memory"))
    devices = each.get("devices")
    return (
        all(isinstance(text, str) for text in texts)
        and _are_sizes(each)
        and all(isinstance(part, list) and all(map(_is_mapping, part)) for part in parts)
        and isinstance(devices, list)
        and all(map(_is_device, devices))
    )


def _is_mapping(mapping: object) -> bool:
    return (
        isinstance(mapping, dict)
        and isinstance(mapping.get("name"), str)
        and type(mapping.get("count")) is int
        and _are_sizes(mapping)
    )


def _are_sizes(record: Mapping[str, Any]) -> bool:
    return all(type(record.get(key)) is int for key in _SIZES)


def _is_device(device: object) -> bool:
    return (
        isinstance(device, dict)
        and isinstance(device.get("device"), str)
        and all(type(device.get(key)) is int for key in _OF_DEVICES)
    )


def _is_progress(progress: object) -> bool:
    if not isinstance(progress, dict):
        return progress is None
    numbers = [progress.get(name) for name in ("total", "rate", "seconds_left")]
    return (
        type(progress.get("step")) is int
        and isinstance(progress.get("seconds_ago"), int | float)
        and isinstance(progress.get("late"), bool)
        and isinstance(progress.get("metrics"), dict)
        and all(isinstance(number, int | float | None) for number in numbers)
    )


def _is_slowness(slowness: object) -> bool:
    if not isinstance(slowness, dict):
        return slowness is None
    numbers = [slowness.get(name) for name in ("step", "late", "waits")]
    return isinstance(slowness.get("slow"), bool) and all(
        isinstance(number, int | float) for number in numbers
    )


def _is_thread(thread: object) -> bool:
    return (
        isinstance(thread, dict)
        and isinstance(thread.get("name"), str)
        and isinstance(thread.get("frames"), list)
        and all(_is_frame(frame) for frame in thread["frames"])
    )


def _is_frame(frame: object) -> bool:
    return (
        isinstance(frame, dict)
        and isinstance(frame.get("file"), str)
        and isinstance(frame.get("function"), str)
        and isinstance(frame.get("line"), int)
    )


def unpack(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer in a record; None if there is none, or it has more than :data:`MAX_ANSWER` bytes."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(record["zlib"]), MAX_ANSWER)
        body = json.loads(data)
    except (KeyError, TypeError, ValueError, zlib.error):
        return None
    return body if isinstance(body, dict) else None
