"""The records of the script's set-up in the workers' store, and what this process knows of them in case the store is lost.

If the store's node is lost, all records are lost with it. Each process then puts what it knows into the next store, and after
that sets the key ``seen/<rank>``. The last process to do so finds all of these keys. A record that is still missing by then is
lost for good, and whoever waits for it is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rallypoint.elastic.communication import setup_record
from rallypoint.elastic.communication.connections import Wiring


# The records' prefix in the store.
RECORDS = "rally/kept"
# Seconds that the others may take to put them into a new store: they may be in a long computation.
PATIENCE = 300.0
_WHOLE = b"1"
_LOST = b"0"


class RecordsLost(Exception):
    """Nobody has the record of a rank any more."""


class Records:
    """The records in the workers' store.

    Args:
        host, port: of the store.
        ranks: how many there were in the script's set-up. All ranks in this class are those of the set-up.
        is_new: this process takes the place of a lost one, and reads its rank's record.
    """

    def __init__(self, host: str, port: int, ranks: int, *, is_new: bool) -> None:
        self._ranks = ranks
        self.address = host, port
        self._wiring = Wiring(host, port, RECORDS)
        self._storing: Wiring | None = None  # a new store's, until all is stored there
        # What this process knows, and the ranks whose complete records it has: its own, and those that it is a partner of.
        self._known: dict[str, bytes] = {}
        self._holds: set[int] = set()
        self._is_read = not is_new  # all of this rank's record can be read
        # The store in which this process has set its `seen` key. In the first store, nothing is missing.
        self._seen_in = None if is_new else self.address

    def publish(self, rank: int, parts: Iterable[tuple[str, bytes]]) -> None:
        """Store the record of this process's set-up, for processes that may take its place."""
        for key, value in parts:
            self._wiring.set(key, value)
        self._wiring.set(setup_record.whole_key(rank), _WHOLE)

    def forget(self) -> None:
        """This process becomes another rank."""
        self._known.clear()

    def note_read(self, rank: int) -> None:
        """All of this rank's record has been read."""
        self._holds.add(rank)

    def hold(self, rank: int, places: Sequence[tuple[str, int]]) -> None:
        """Remember a rank's record, if the store has all of it.

        Args:
            rank: the one whose set-up it is.
            places: the names of the rank's groups, and its rank in each.
        """
        if rank in self._holds or self._peek(setup_record.whole_key(rank)) != _WHOLE:
            return
        for place in places:
            for key in setup_record.keys(*place):
                value = self._peek(key)
                if value is not None:
                    self._known[key] = value
        self._holds.add(rank)

    def holds_all(self, ranks: Iterable[int]) -> bool:
        """Whether this process knows the records of all these ranks."""
        return self._holds.issuperset(ranks)

    def store_again(
        self, host: str, port: int, generation: int, is_outdated: Callable[[], bool]
    ) -> None:
        """If the store has been replaced, put into the new one what newcomers need. A newer notice ends this.

        Raises:
            RendezvousConnectionError: the store does not answer, or there is a newer notice.
        """
        if (host, port) == self.address and not self._wiring.is_cut:
            return
        wiring = Wiring(host, port, RECORDS, generation)
        self._storing = wiring
        if is_outdated():
            wiring.cut()
        store = wiring.store()
        for key, value in self._known.items():
            if store.peek(f"{RECORDS}/{key}") is None:
                wiring.set(key, value)
        for rank in self._holds:
            wiring.set(setup_record.whole_key(rank), _WHOLE)
        self._storing = None
        self._wiring.cut()
        self._wiring, self.address = wiring, (host, port)
        self._seen_in = None

    def say_seen(self, rank: int) -> None:
        """This process has stored what it knows. If it is the last one to do so in this store, mark what is lost.

        Raises:
            RendezvousConnectionError: the store does not answer.
        """
        if self._seen_in == self.address:
            return
        self._wiring.set(_seen_key(rank), b"1")
        self._seen_in = self.address
        ranks = range(self._ranks)
        if None in self._peek_all(map(_seen_key, ranks)):
            return
        wholes = [setup_record.whole_key(each) for each in ranks]
        for key, value in zip(wholes, self._peek_all(wholes), strict=True):
            if value is None:
                self._wiring.set(key, _LOST)

    def read(self, key: str, rank: int, *, is_spare: bool) -> bytes | None:
        """A part of a rank's record; None if the record has no such part. Blocks: until the record is in the store.

        Args:
            rank: the one that this process runs the set-up as.
            is_spare: another process has this rank, and can store the record.

        Raises:
            RecordsLost: nobody has it, or nobody has stored it in time.
            RendezvousConnectionError: the store does not answer.
        """
        try:
            if not self._is_read:
                if not is_spare:
                    self.say_seen(rank)
                if self._wiring.wait(setup_record.whole_key(rank), PATIENCE) == _LOST:
                    raise RecordsLost
                self._is_read = True
        except TimeoutError:
            raise RecordsLost from None
        value = self._peek(key)
        if value is not None:
            self._known[key] = value
        return value

    def cut(self, generation: int) -> None:
        """Stop storing into a new store, if that was begun before this generation."""
        storing = self._storing
        if storing is not None and storing.generation < generation:
            storing.cut()

    def _peek(self, key: str) -> bytes | None:
        return self._wiring.store().peek(f"{RECORDS}/{key}")

    def _peek_all(self, keys: Iterable[str]) -> list[bytes | None]:
        return self._wiring.store().get_filled([f"{RECORDS}/{key}" for key in keys])


def _seen_key(rank: int) -> str:
    return f"seen/{rank}"
