"""What a broken member writes under a true MAC fails no leader: each part of a round treats what it reads with suspicion."""

import json

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from rallypoint.rendezvous import plan
from rallypoint.rendezvous.plan import MAX_ARRIVAL, NUM_STANDBYS
from rallypoint.rendezvous.records import MAX_DEPTH, Codec


CODEC = Codec("job", b"a secret of sixteen bytes")

_NUMBERS = st.one_of(
    st.integers(-2, 5), st.just(-(10**400)), st.just(10**400), st.booleans(), st.floats(0, 9)
)
_LEAVES = st.one_of(
    st.none(), _NUMBERS, st.sampled_from(["", "failed", "suspect", "a b", "x" * 999])
)
_JSON = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "port"]), inner, max_size=2)
    ),
    max_leaves=6,
)
_FACTS = st.dictionaries(
    st.sampled_from(["workers", "restarts", "verdict", "ages", "held", "standby", "serves"]), _JSON
)
_RECORDS = st.fixed_dictionaries(
    {"id": st.sampled_from(["a", "b1", "", 7])},
    optional={
        "host": _JSON,
        "label": _JSON,
        "last_rank": _JSON,
        "given_rank": _JSON,
        "facts": _FACTS | _JSON,
    },
)


def publish(records: dict) -> bytes:
    """What a leader does with the records that are valid arrivals."""
    slots = [slot for slot, record in records.items() if plan.arrival(slot, record) is not None]
    if not slots:
        return b""
    made = plan.make("me.0", 1, slots, [], records)
    held = [records[slot] for slot in slots]
    made["ages"] = list(plan.ages(held))
    made["restarts"] = plan.restarts(held, whole=True)
    return CODEC.pack("1/plan", made)


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.lists(_RECORDS, min_size=1, max_size=4))
def test_any_records_make_a_plan_that_can_be_written(bodies):
    read = {slot: CODEC.unpack("k", CODEC.pack("k", body)) for slot, body in enumerate(bodies)}
    data = publish(read)
    assert not data or CODEC.unpack("1/plan", data)


@pytest.mark.parametrize("verdict", [["failed"], {"a": 1}])
def test_a_verdict_of_another_type_is_none(verdict):
    assert plan.restarts([{"last_rank": 0, "facts": {"verdict": verdict}}], whole=True) == 0


def test_an_age_beyond_all_numbers_does_not_count():
    assert plan.ages([{"facts": {"ages": [10**400, 2, -1, "x"]}}]) == (2.0,)


def nested(levels: int) -> dict:
    body: dict = {}
    for _ in range(levels):
        body = {"a": body}
    return body


def test_a_record_too_deep_or_too_large_for_a_plan_is_no_arrival():
    for levels in range(MAX_DEPTH):
        record = {"id": "a", "facts": {"standby": nested(levels)}}
        publish({0: record})  # raises if a plan could not repeat it
    assert plan.arrival(0, record) is None
    assert plan.arrival(0, {"id": "a", "facts": {"standby": {"a": "x" * MAX_ARRIVAL}}}) is None


def test_the_largest_records_fit_into_a_plan():
    room = MAX_ARRIVAL - len(json.dumps({"id": "a0", "facts": {"standby": {"a": ""}}})) - 8
    records = {
        slot: {"id": f"a{slot}", "facts": {"standby": {"a": "x" * room}}}
        for slot in range(NUM_STANDBYS + 1)
    }
    assert all(plan.arrival(slot, record) for slot, record in records.items())
    assert publish(records)
