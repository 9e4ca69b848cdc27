"""The store may hold anybody's bytes: they are read as the job's record or raise BadRecord, and nothing else happens."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from pace import pace
from rallypoint.rendezvous.records import MAX_DEPTH, MAX_RECORD, BadRecord, Codec


KEY = "rally/job/0/plan"
SECRET = b"the job's secret"
PLAIN, SECURE = Codec("job"), Codec("job", SECRET)
# Text that JSON may carry: half a surrogate pair is not text.
TEXT = st.text(st.characters(exclude_categories=("Cs",)))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(TEXT, JSON, max_size=5)
codecs = pytest.mark.parametrize("codec", [PLAIN, SECURE], ids=["plain", "secret"])


def refused(codec: Codec, data: bytes, key: str = KEY) -> str:
    with pytest.raises(BadRecord) as caught:
        codec.unpack(key, data)
    return str(caught.value)


@codecs
@given(body=BODIES)
def test_what_was_packed_is_unpacked(codec: Codec, body: dict[str, Any]) -> None:
    assert codec.unpack(KEY, codec.pack(KEY, body)) == body


@codecs
@given(data=st.binary(max_size=400))
@example(b"")
@example(b"\n")
@example(b"null")
@example(b'{"v":1,"body":{}}\n')
@example(b"\xff\xfe{\x00}\x00")
@example('{"v":1,"body":{}}'.encode("utf-16"))
def test_arbitrary_bytes_are_a_record_or_a_bad_one(codec: Codec, data: bytes) -> None:
    try:
        assert isinstance(codec.unpack(KEY, data), dict)
    except BadRecord:
        pass
    else:
        assert codec is PLAIN, "nobody guesses a MAC"


@given(value=JSON)
def test_arbitrary_json_is_a_record_or_a_bad_one(value: Any) -> None:
    for data in (json.dumps(value), json.dumps({"v": 1, "body": value})):
        try:
            assert isinstance(PLAIN.unpack(KEY, data.encode()), dict)
        except BadRecord:
            assert not isinstance(value, dict) or data == json.dumps(value)


@given(body=BODIES, data=st.data())
def test_one_changed_bit_is_noticed(body: dict[str, Any], data: st.DataObject) -> None:
    packed = bytearray(SECURE.pack(KEY, body))
    place = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[place // 8] ^= 1 << place % 8
    refused(SECURE, bytes(packed))


@given(body=BODIES, data=st.data())
def test_a_part_of_a_record_is_none(body: dict[str, Any], data: st.DataObject) -> None:
    for codec in (PLAIN, SECURE):
        packed = codec.pack(KEY, body)
        refused(codec, packed[: data.draw(st.integers(0, len(packed) - 1))])


@pytest.mark.parametrize(
    "where", ["rally/job/0/call", "rally/job/1/plan", "rally/other/0/plan", KEY + "~1", ""]
)
def test_a_record_counts_only_under_the_key_it_was_made_for(where: str) -> None:
    packed = SECURE.pack(KEY, {"order": [0, 1]})
    assert "secret" in refused(SECURE, packed, where)


def test_another_job_with_the_same_secret_is_another_job() -> None:
    packed = Codec("other", SECRET).pack(KEY, {})
    assert "secret" in refused(SECURE, packed)


def test_who_has_another_secret_or_none_is_told_so() -> None:
    assert "secret" in refused(Codec("job", b"another"), SECURE.pack(KEY, {}))
    assert "secret" in refused(SECURE, PLAIN.pack(KEY, {}))
    assert "--secret-file" in refused(PLAIN, SECURE.pack(KEY, {}))


@pytest.mark.parametrize(
    "line",
    [
        '{"v":1,"body":{"x":NaN}}',
        '{"v":1,"body":{"x":Infinity}}',
        '{"v":1,"body":{"x":-Infinity}}',
        '{"v":1,"body":{"x":1e999}}',  # infinite once read
        '{"v":1,"body":{"x":' + "9" * 5000 + "}}",  # Python refuses to convert it
        '{"v":1,"body":{"x":"\\ud800"}}',  # not text
        '{"v":1,"body":{"\\udfff":1}}',
        '{"v":1,"body":[]}',
        '{"v":1}',
        '{"body":{}}',
        '[{"v":1,"body":{}}]',
        '{"v":1,"body":{}} {}',
        '{"v":1,"body":{}',
        "1",
    ],
)
def test_what_is_no_record(line: str) -> None:
    refused(PLAIN, line.encode())


@pytest.mark.parametrize("version", ["0", "2", '"1"', "null", "[1]", "{}"])
def test_another_version_is_told_what_to_do(version: str) -> None:
    why = refused(PLAIN, b'{"v":%s,"body":{}}' % version.encode())
    assert "install the same version" in why


def nested(depth: int) -> bytes:
    return b'{"v":1,"body":{"x":' + b"[" * depth + b"]" * depth + b"}}"


@pytest.mark.parametrize("depth", [MAX_DEPTH, 200, 900, 5_000, 400_000])
def test_deep_nesting_is_refused_and_not_recursed_into(depth: int) -> None:
    """Python might be able to read it, but not to write it again with a deeper stack."""
    refused(PLAIN, nested(depth))
    refused(PLAIN, b"[" * depth)
    refused(PLAIN, b'{"v":' * depth)


def test_nesting_that_our_own_records_have_passes() -> None:
    assert PLAIN.unpack(KEY, nested(MAX_DEPTH - 3))["x"]
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        PLAIN.pack(KEY, {"x": deep})


def test_what_is_too_large_is_neither_written_nor_read() -> None:
    with pytest.raises(ValueError, match="at most"):
        PLAIN.pack(KEY, {"x": "y" * MAX_RECORD})
    assert "at most" in refused(PLAIN, b'{"v":1,"body":{"x":"' + b"y" * MAX_RECORD + b'"}}')


def test_the_numbers_that_json_has_not_are_not_written() -> None:
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            PLAIN.pack(KEY, {"x": number})


@pytest.mark.parametrize(
    "data",
    [
        b"[" * MAX_RECORD,
        b"[0," * (MAX_RECORD // 3),
        b'{"v":1,"body":{"x":[' + b"0," * (MAX_RECORD // 2 - 20) + b"0]}}",
        b'{"v":1,"body":{"x":' + b"9" * (MAX_RECORD - 30) + b"}}",
        b'{"v":1,"body":{"x":"' + b"\\u0041" * (MAX_RECORD // 6 - 10) + b'"}}',
        b"\\" * MAX_RECORD,
        b"\n" * MAX_RECORD,
    ],
    ids=["brackets", "list", "numbers", "digits", "escapes", "backslashes", "lines"],
)
@codecs
def test_the_worst_megabyte_is_judged_in_no_time(codec: Codec, data: bytes) -> None:
    before = time.monotonic()
    try:
        codec.unpack(KEY, data)
    except BadRecord:
        pass
    assert time.monotonic() - before < 2 * pace()


def test_a_plan_of_4096_nodes_fits() -> None:
    assert len(PLAIN.pack(KEY, {"order": list(range(4096)), "spares": []})) < MAX_RECORD / 10


def test_with_a_secret_the_names_of_keys_tell_nothing_of_the_job() -> None:
    assert PLAIN.prefix == "rally/job/"
    for run_id in ("job", "llama-70b", "x" * 300, "ünï/cödé"):
        prefix = Codec(run_id, SECRET).prefix
        assert run_id not in prefix
        assert len(prefix) < 40
        assert prefix not in {Codec(run_id, b"other").prefix, Codec(run_id + "2", SECRET).prefix}
        assert prefix == Codec(run_id, SECRET).prefix
