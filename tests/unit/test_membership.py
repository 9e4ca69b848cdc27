"""Members' records, and a dynamic group's journal under random schedules of joiners, deaths and readers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint._core.host import host_identity, same_host
from rallypoint.errors import InternalError, ProtocolError, RpcError
from rallypoint.rpc import Device, NodeDevices
from rallypoint.rpc.groups import membership
from rallypoint.rpc.groups.member import MAX_ID, MAX_RECORD, Member, check_name
from rallypoint.rpc.groups.membership import (
    HOLE_GRACE,
    VOID,
    Entry,
    Gone,
    Join,
    Joined,
    Leave,
    Lost,
    Refused,
    View,
    advance,
    decide_holes,
)


def member(name: str, rank: int = 0, incarnation: str = "") -> Member:
    return Member(name=name, id=rank, incarnation=incarnation or name.encode().hex().ljust(8, "0"))


FULL = Member(
    name="w:0",
    id=3,
    incarnation="0123abcd",
    host="boot net mnt",
    pid=12,
    addresses={"uds": "/tmp/x", "tcp": ("h1", 4000)},
    devices=NodeDevices(
        counts={"cuda": 2},
        devices=(Device("cuda", 1),),
        maps={"b": {Device("cuda", 1): Device("cpu")}},
    ),
    version="0.1",
    extra={"role": ["a", 1, None]},
)


# -- the record -----------------------------------------------------------------------------------


def test_a_record_comes_back_whole() -> None:
    assert Member.decode(FULL.encode()) == FULL
    assert hash(Member.decode(FULL.encode())) == hash(FULL)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", "a b"),
        ("name", ""),
        ("name", "ä"),
        ("name", "a\n"),
        ("name", "x" * 128),
        ("name", None),
        ("id", -1),
        ("id", True),
        ("id", 2**31),
        ("id", 1.0),
        ("incarnation", "../etc"),
        ("incarnation", ""),
        ("host", "x" * 2000),
        ("pid", "1"),
        ("addresses", []),
        ("addresses", {"tcp": ["h", 0]}),
        ("addresses", {"tcp": ["h", 70000]}),
        ("addresses", {"tcp": ["h", 1, 2]}),
        ("addresses", {"uds": 5}),
        ("addresses", {str(i): "p" for i in range(65)}),
        ("devices", None),
        ("devices", {"counts": {"cuda": -1}, "devices": [], "maps": {}}),
        ("devices", {"counts": {}, "devices": ["cuda:"], "maps": {}}),
        ("devices", {"counts": {}, "devices": ["cuda:" + "9" * 2000], "maps": {}}),
        ("devices", {"counts": {}, "devices": "cuda:0", "maps": {}}),
        ("devices", {"counts": {}, "devices": [], "maps": {"b": ["cuda:0"]}}),
        ("version", 1),
        ("extra", []),
    ],
)
def test_a_malformed_field_is_refused(path: str, value: object) -> None:
    record = json.loads(FULL.encode())
    record["member"][path] = value
    with pytest.raises(ProtocolError):
        Member.decode(json.dumps(record).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"v":1}',
        b'{"v":2,"member":{}}',
        b'{"v":true,"member":{}}',
        b'{"v":1,"member":NaN}',
        b"[" * 50_000,
        b'{"v":' + b"9" * 5000 + b"}",
        b'{"v":1,"member":"' + b"x" * MAX_RECORD + b'"}',
    ],
)
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    for decode in (Member.decode, membership.decode, membership.decode_outline):
        with pytest.raises(ProtocolError):
            decode(data)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["v", "kind", "member", "name", "rank", "seats", "epoch"]),
                inner,
                max_size=5,
            )
        ),
        max_leaves=12,
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for decode in (Member.decode, membership.decode, membership.decode_outline):
        try:
            decode(data)
        except ProtocolError:
            pass


def test_a_record_that_is_too_large_is_not_written() -> None:
    with pytest.raises(ProtocolError, match="put less into"):
        replace(FULL, extra={"x": "y" * MAX_RECORD}).encode()
    with pytest.raises(ProtocolError, match="not JSON"):
        replace(FULL, extra={"x": object()}).encode()


def test_names_are_refused_in_torchs_words() -> None:
    for name, words in (
        ("abc*", "must match"),
        (" ", "must match"),
        ("a\n", "must match"),
        ("", "non-empty"),
    ):
        with pytest.raises(RpcError, match=words):
            check_name(name)
    with pytest.raises(RpcError, match="shorter than 128"):
        member("a" * 128)
    assert check_name("a-Z_0:9" + "x" * 120)


def test_who_knows_no_host_shares_none() -> None:
    assert host_identity() == host_identity() != ""
    assert same_host(host_identity(), host_identity())
    assert not same_host("", "")
    assert not member("a").shares_host(member("b"))


# -- the journal ----------------------------------------------------------------------------------


def run(*entries: Entry) -> tuple[View, list[object]]:
    view, events = advance(View(), 1, entries)
    return view, list(events)


def names(view: View) -> dict[int, str]:
    return {each.id: each.name for each in view.members()}


@pytest.mark.parametrize(
    "entry",
    [Join(FULL), Join(FULL, given=False), Leave(1, "ab", "why"), Lost(1, "ab", "why"), VOID],
)
def test_entries_come_back_whole(entry: Entry) -> None:
    assert membership.decode(membership.encode(entry)) == entry


def test_a_reason_that_is_too_long_is_cut_and_not_lost() -> None:
    back = membership.decode(membership.encode(Lost(1, "ab", "x" * 100_000)))
    assert isinstance(back, Lost) and len(back.reason) == 1024


def test_the_second_of_a_name_or_rank_is_refused() -> None:
    view, events = run(
        Join(member("a", 0)),
        Join(member("a", 1, "f" * 8)),
        Join(member("b", 0)),
        Join(member("c", 1)),
    )
    assert names(view) == {0: "a", 1: "c"} and view.epoch == 4
    assert [type(each) for each in events] == [Joined, Refused, Refused, Joined]
    assert "is not unique" in events[1].reason and "rank 0 is taken by 'a'" in events[2].reason


def test_a_name_is_free_at_the_epoch_of_its_leave() -> None:
    a, b = member("a", 0), member("a", 0, "f" * 8)
    before, _ = run(Join(a))
    assert before.find("a") == a
    at, events = advance(before, 2, [Leave(0, a.incarnation, "done")])
    assert at.find("a") is None and at.find(0) is None and at.epoch == 2
    assert events == (Gone(2, a, "done", lost=False),)
    after, _ = advance(at, 3, [Join(b)])
    assert after.find("a") == b


def test_what_one_that_is_out_reports_does_not_count() -> None:
    a, b, c = member("a", 0), member("b", 1, "b" * 8), member("c", 2, "c" * 8)
    out = Lost(1, b.incarnation, "cut off", a.incarnation)
    view, events = run(Join(a), Join(b), Join(c), out, Lost(0, a.incarnation, "", b.incarnation))
    assert names(view) == {0: "a", 2: "c"} and view.epoch == 5
    assert membership.decode(membership.encode(out)) == out
    assert isinstance(events[-1], Gone) and events[-1].member == b


def test_a_report_about_the_process_before_does_not_hit_its_successor() -> None:
    a, b = member("a", 0), member("a", 0, "f" * 8)
    view, events = run(
        Join(a), Lost(0, a.incarnation), Join(b), Lost(0, a.incarnation), Leave(0, a.incarnation)
    )
    assert view.find("a") == b and len(events) == 3 and view.epoch == 5


def test_a_rank_that_is_given_is_never_one_that_was_used() -> None:
    a = member("a")
    view, _ = run(
        Join(a, given=False),
        Join(member("b", 7)),
        Leave(0, a.incarnation),
        Join(member("c"), given=False),
    )
    assert names(view) == {7: "b", 8: "c"}


def test_the_highest_rank_does_not_end_giving_ranks() -> None:
    view, _ = run(
        Join(member("a", MAX_ID)), Join(member("b"), given=False), Join(member("c"), given=False)
    )
    assert names(view) == {0: "b", 1: "c", MAX_ID: "a"}


def test_entries_that_are_known_are_passed_over_and_gaps_are_not() -> None:
    entries = [Join(member(name, rank)) for rank, name in enumerate("abc")]
    view, _ = advance(View(), 1, entries[:2])
    assert advance(view, 1, entries[:1]) == (view, ())
    again, events = advance(view, 1, entries)
    assert again == advance(View(), 1, entries)[0] and len(events) == 1
    with pytest.raises(InternalError):
        advance(view, 4, entries)


def test_device_maps_are_checked_between_the_newcomer_and_those_concerned() -> None:
    gpu = NodeDevices(counts={"cuda": 1})
    two = {Device("cuda", 0): Device("cuda", 1)}
    caller = replace(member("a"), devices=NodeDevices(counts={"cuda": 1}, maps={"b": two}))
    view, _ = run(Join(caller))
    newcomer = replace(member("b", 1), devices=gpu)
    assert "target devices with invalid indices" in str(membership.device_problem(view, newcomer))
    assert membership.device_problem(view, replace(newcomer, name="c")) is None
    assert membership.device_problem(View(), caller) is None


def test_a_hole_is_filled_after_the_grace_and_not_before() -> None:
    first = decide_holes(10.0, {}, [5, 4])
    assert first.fill == () and first.look_at == 10.0 + HOLE_GRACE
    second = decide_holes(10.5, first.since, [5, 6])  # 4 has arrived
    assert second.fill == () and second.since == {5: 10.0, 6: 10.5}
    third = decide_holes(11.0, second.since, [5, 6])
    assert third.fill == (5,) and third.look_at == 11.5
    assert decide_holes(11.5, third.since, []).look_at is None


def test_an_outline_whose_entries_are_no_joins_is_refused() -> None:
    plan = membership.Outline(3, 1, {0: 2})
    for entry in (VOID, Leave(0, "ab")):
        with pytest.raises(ProtocolError):
            membership.restore(plan, {2: entry})
    with pytest.raises(ProtocolError):
        membership.restore(plan, {})


# -- random schedules -----------------------------------------------------------------------------


@dataclass
class World:
    """A store, and a clock."""

    now: float = 0.0
    counter: int = 0
    entries: dict[int, bytes] = field(default_factory=dict)

    def put_new(self, number: int, data: bytes) -> bytes:
        return self.entries.setdefault(number, data)


@dataclass
class Process:
    """Writes entries in two steps, reads and fills holes; it may be stopped or die at every ``yield``."""

    world: World
    view: View = field(default_factory=View)
    history: list[tuple[int, dict[int, str]]] = field(default_factory=list)

    def apply(self) -> None:
        while (data := self.world.entries.get(self.view.epoch + 1)) is not None:
            self.view, _ = advance(self.view, self.view.epoch + 1, [membership.decode(data)])
            self.history.append((self.view.epoch, names(self.view)))

    def settle(self, last: int) -> Iterator[None]:
        since: dict[int, float] = {}
        while self.view.epoch < last:
            self.apply()
            absent = [
                n for n in range(self.view.epoch + 1, last + 1) if n not in self.world.entries
            ]
            yield
            decision = decide_holes(self.world.now, since, absent)
            since = dict(decision.since)
            for number in decision.fill:
                self.world.put_new(number, membership.encode(VOID))
                yield

    def write(self, entry: Entry) -> Iterator[None]:
        data = membership.encode(entry)
        while True:
            self.world.counter += 1
            number = self.world.counter
            yield
            if self.world.put_new(number, data) == data:
                break
            yield
        yield from self.settle(number)

    def read(self) -> Iterator[None]:
        yield from self.settle(self.world.counter)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "join any", "leave", "lost", "read"]),
        st.integers(0, 4),  # whose name or rank
        st.integers(1, 9),  # steps until it dies; 9: never
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150)
@given(acts=ACTS, data=st.data())
def test_everybody_sees_the_same_epochs_and_nobody_is_blocked(acts, data) -> None:
    world = World()
    witness = Process(world)  # reads from time to time, whatever the others do
    running: list[tuple[Process, Iterator[None], int]] = []
    processes = [witness]
    for index, (what, which, steps) in enumerate(acts):
        process = Process(world)
        processes.append(process)
        incarnation, other = f"{index:08x}", which % len(acts)
        entry: Entry | None = {
            "join": Join(member(f"w{which}", which, incarnation)),
            "join any": Join(member(f"w{which}", 0, incarnation), given=False),
            "leave": Leave(acts[other][1], f"{other:08x}"),
            "lost": Lost(acts[other][1], f"{other:08x}"),
            "read": None,
        }[what]
        work = process.read() if entry is None else process.write(entry)
        running.append((process, work, steps))
    turns = 0
    while running:
        turns += 1
        assert turns < 5000, "somebody is blocked"
        world.now += 0.3
        index = data.draw(st.integers(0, len(running) - 1)) if turns < 60 else turns % len(running)
        process, work, steps = running[index]
        if steps == 0:
            running.pop(index)  # dies here
            continue
        try:
            next(work)
            running[index] = (process, work, steps if steps == 9 else steps - 1)
        except StopIteration:
            running.pop(index)
        if turns % 7 == 0:
            witness.apply()
    for _ in witness.read():
        world.now += 0.3
    assert witness.view.epoch == world.counter
    truth = dict(witness.history)
    for process in processes:
        for epoch, members in process.history:
            assert members == truth[epoch]
    for epoch, members in truth.items():
        assert len(set(members.values())) == len(members), f"a name twice at epoch {epoch}"
    # A newcomer that reads an outline of any epoch comes to the same view.
    stored = {number: membership.decode(each) for number, each in world.entries.items()}
    for cut in range(world.counter + 1):
        part, _ = advance(View(), 1, [stored[number] for number in range(1, cut + 1)])
        plan = membership.decode_outline(membership.encode_outline(membership.outline(part)))
        view = membership.restore(plan, stored)
        view, _ = advance(view, cut + 1, [stored[n] for n in range(cut + 1, world.counter + 1)])
        assert view == witness.view
