"""Whether idle workers hang, judged by their stacks: who waits in a collective or a recovery, and who does not come. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rallypoint._core.rank_words import in_words
from rallypoint.control.collectives import collective_waits

from . import stack_groups


# Python code in which a rank waits for others. The autograd engine is included: DDP and FSDP wait in backward.
# A session has barriers of its own.
_WAITS = re.compile(
    r"/torch/distributed/(?!rpc/|run|launch|elastic/)|/torch/autograd/graph\.py$"
    r"|/rallypoint/elastic/communication/"
)
# Where the ranks of a session meet after a loss.
_MEETS = re.compile(r"/rallypoint/elastic/recovery/meeting\.py:_meet$")
# Where a rank waits for the others to leave a group for calls; for the answer to a call; and where it serves one.
_LEAVES = re.compile(r"/rallypoint/rpc/finalization\.py:shutdown$")
_CALLS = re.compile(r"/rallypoint/rpc/(?:calling|future|stream)\.py$")
_SERVES = re.compile(r"/rallypoint/rpc/agent/serving\.py$")
# A rank must have waited in a collective for this share of the time without progress: its record may be younger than the hang.
WAITED = 0.5


@dataclass(frozen=True, slots=True)
class Hang:
    """A job in which no worker makes progress.

    Args:
        missing: the ranks that the others wait for, or whose call does not match theirs; empty if unknown.
        waiting: the ranks that wait in a collective, for the others to recover from a loss, or for a call; empty if the missing
            ones merely have not ended, as others have.
        text: a description for people.
        begun: by group (its name and members) and rank, the number of the last collective, or of calls. None if records show a
            long wait in a collective. Otherwise only the stacks show the hang, and steps may have been advancing at the moment
            of the look.
        is_certain: false if the missing ranks may still come, or wait for something that nobody here knows of.
    """

    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    text: str
    begun: Mapping[tuple[str, tuple[int, ...]], Mapping[int, int]] | None = None
    is_certain: bool = True

    def confirms(self, earlier: Hang | None) -> bool:
        """Whether to report this hang: a record shows it, or an earlier look found the same."""
        if self.begun is None:
            return True
        if earlier is None or earlier.begun is None:
            return False
        # A busy worker may not have reported what it has started.
        known = [(key, rank) for key, ranks in self.begun.items() for rank in ranks]
        return not set(self.waiting).isdisjoint(earlier.waiting) and all(
            earlier.begun.get(key, {}).get(rank, self.begun[key][rank]) == self.begun[key][rank]
            for key, rank in known
        )


def explain(
    processes: Sequence[Mapping[str, Any]],
    seconds: float,
    world_size: int,
    *,
    ended: Collection[int] = (),
    unheard: Collection[int] = (),
    working: bool = False,
    by_stacks: bool = True,
) -> Hang | None:
    """Why there is no progress, or hardly any.

    Args:
        processes: stacks of the workers, with or without children.
        seconds: how long no worker has used storage or any significant CPU time.
        world_size: how many workers there are.
        ended: ranks whose worker is known to have ended.
        unheard: ranks of nodes that did not answer.
        working: whether some workers are busy, while the others have done nothing for that long.
        by_stacks: with ``working``, whether stacks are sufficient evidence; otherwise records of collectives are required.
    Returns:
        None if no rank waits for others (servers wait for requests as long as they like) and none has ended, or if the longest wait
        in a collective is less than half of ``seconds``. With ``working``, also None if all ranks wait.
    """
    workers = [each for each in processes if not each["name"]]
    still = f"no worker has used CPU or storage for {seconds:.0f} s (a printed line does not count)"
    meeting = sorted(each["rank"] for each in workers if _has_frame(each, _MEETS))
    if meeting:
        # Whatever the records say is about connections that the loss has closed.
        return _without_recovery(processes, meeting, seconds, still, working=working)
    known = {each["rank"]: each["collectives"] for each in workers if each.get("collectives")}
    waited = collective_waits.longest(known)
    if waited is not None and waited < WAITED * seconds:
        return None  # steps advance, and need little CPU
    found = collective_waits.verdict(known, unheard)
    if found is not None:
        gone = _have_ended(sorted(set(found.missing) & set(ended)))
        moved = "" if working else f"\n{still}"
        text = f"{found.text}{gone}{moved}\n{stack_groups.text(processes)}"
        return Hang(found.missing, found.waiting, text)
    waiting = sorted(each["rank"] for each in workers if _has_frame(each, _WAITS))
    if not waiting:
        if working:
            return None
        return _among_calls(processes, still) or _left_alone(processes, ended, still)
    missing = sorted({each["rank"] for each in workers} - set(waiting))
    gone = ""
    if not missing and not working:
        # All remaining ranks wait, so they must be waiting for those that have ended.
        missing = sorted(set(ended) - set(waiting))
        gone = _have_ended(missing)
    others = in_words(waiting)
    one = len(waiting) == 1
    if working:
        if not missing or not by_stacks:
            return None
        head = (
            f"{others} {'has' if one else 'have'} waited in a collective for {seconds:.0f} s;"
            f" {in_words(missing)} {'is' if len(missing) == 1 else 'are'} still at work elsewhere"
        )
    elif missing:
        who = in_words(missing)
        comes = "does not come" if len(missing) == 1 else "do not come"
        head = f"{who} {comes} to a collective in which {others} {'waits' if one else 'wait'}: {still}{gone}"
    elif len(workers) < world_size:
        head = f"{others} {'waits' if one else 'wait'} in a collective, and {still}"
    elif len(stack_groups.groups(workers)) > 1:
        head = (
            f"all ranks wait in collectives, but not at the same place: {still}."
            " Do they call the same collectives in the same order?"
        )
    else:
        head = (
            f"all ranks wait in the same collective: {still}."
            " Do their sizes and groups match? Is the network between the nodes up?"
        )
    text = f"{head}\n{stack_groups.text(processes)}"
    return Hang(tuple(missing), tuple(waiting), text, collective_waits.last_begun(known))


def _without_recovery(
    processes: Sequence[Mapping[str, Any]],
    meeting: Sequence[int],
    seconds: float,
    still: str,
    *,
    working: bool,
) -> Hang | None:
    """The hang of a session whose ranks cannot recover from a loss, as some do not meet the others."""
    missing = sorted({each["rank"] for each in processes if not each["name"]} - set(meeting))
    others, who = in_words(meeting), in_words(missing)
    one, is_one = len(meeting) == 1, len(missing) == 1
    if working and not missing:
        return None
    if working:
        head = (
            f"{others} {'has' if one else 'have'} waited {seconds:.0f} s for {who} to recover from a loss;"
            f" {who} {'is' if is_one else 'are'} still at work"
        )
    else:
        head = f"{others} {'waits' if one else 'wait'} for {who if missing else 'others'} to recover from a loss: {still}"
        if missing:
            head += "\n--step-timeout SECONDS replaces workers of a session that hang"
        else:
            head += ". Is the network between the nodes up?"
    text = f"{head}\n{stack_groups.text(processes)}"
    return Hang(tuple(missing), tuple(meeting), text, {}, is_certain=not working)


def _among_calls(processes: Sequence[Mapping[str, Any]], still: str) -> Hang | None:
    """The hang of ranks that wait for the answer to a call, or for the others to leave their group for calls."""
    workers = [each for each in processes if not each["name"]]
    leave = {each["rank"] for each in workers if _has_frame(each, _LEAVES)}
    call = {each["rank"] for each in workers if _has_frame(each, _CALLS)} - leave
    served = [record for each in workers for record in _served(each)]
    serve = {each["rank"] for each in served}
    waiting = sorted(call or leave)
    # Calls that go on, however slow and idle each of them is, show in these numbers.
    made = {each["rank"]: each["calls"] for each in workers if each.get("calls") is not None}
    if not waiting or made.keys().isdisjoint(waiting):
        return None
    verb = "waits" if len(waiting) == 1 else "wait"
    if call:
        missing = sorted(serve)
        head = f"{in_words(waiting)} {verb} for the answer to a call"
    else:
        missing = sorted({each["rank"] for each in workers} - leave)
        head = f"{in_words(waiting)} {verb} in rpc.shutdown()"
        if missing:
            head += f" for {in_words(missing)}"
    if serve:
        head += f"; {in_words(sorted(serve))} still {'serves' if len(serve) == 1 else 'serve'} one"
        head += "" if call else " of their calls"
    text = f"{head}: {still}\n{stack_groups.text([*served, *processes])}"
    missing = missing or sorted(serve)
    return Hang(tuple(missing), tuple(waiting), text, {("calls", ()): made}, is_certain=False)


def _served(process: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """For each call that a process serves, a record of where that is, as if it were the main thread."""
    found: list[Mapping[str, Any]] = []
    for thread in process["threads"]:
        frames = thread["frames"]
        ours = [at for at, each in enumerate(frames) if _SERVES.search(each["file"])]
        if ours and frames[ours[-1] + 1 :]:
            found.append({**process, "threads": [{**thread, "frames": frames[ours[-1] + 1 :]}]})
    return found


def _left_alone(
    processes: Sequence[Mapping[str, Any]], ended: Collection[int], still: str
) -> Hang | None:
    """Ranks that do nothing, and wait for nobody, although others have ended."""
    left = sorted({each["rank"] for each in processes if not each["name"]} - set(ended))
    if not ended or not left:
        return None
    are, have = ("is" if len(left) == 1 else "are"), ("has" if len(ended) == 1 else "have")
    head = f"{in_words(left)} {are} still running, although {in_words(sorted(ended))} {have} ended: {still}"
    text = f"{head}\n{stack_groups.text(processes)}"
    return Hang(tuple(left), (), text, is_certain=False)


def _have_ended(ranks: Sequence[int]) -> str:
    return f"; {in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} ended" if ranks else ""


def _has_frame(process: Mapping[str, Any], place: re.Pattern[str]) -> bool:
    """Whether the main thread is in this place: a file, or a function of one as ``FILE:FUNCTION``."""
    threads = process["threads"]
    return bool(threads) and any(
        place.search(each["file"]) or place.search(f"{each['file']}:{each['function']}")
        for each in threads[0]["frames"]
    )
