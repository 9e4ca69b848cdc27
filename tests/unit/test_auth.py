"""The handshake: whatever a stranger sends, it is not believed, and whoever fails is told why."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import AuthenticationError, ConfigError, ProtocolError
from rallypoint.wire.auth import MAX_HANDSHAKE, Accepting, Connecting


SECRET = b"the job's own secret"
A = {"job": "x", "generation": 2, "name": "a", "transports": ["shm", "tcp"]}
B = {"job": "x", "generation": 2, "name": "bé", "devices": {"cuda": 2}}

connecting = partial(Connecting, SECRET, A, b"a" * 32)
accepting = partial(Accepting, SECRET, B, b"b" * 32)
End = Connecting | Accepting


def frame(message: object, *, magic: bytes = b"RLY1") -> bytes:
    payload = message if isinstance(message, bytes) else json.dumps(message).encode()
    return magic + len(payload).to_bytes(4, "little") + payload


def messages(a: Connecting, b: Accepting) -> list[bytes]:
    """The four messages of an undisturbed handshake."""
    hello = a.start()
    answer = b.receive(hello)
    proof = a.receive(answer)
    last = b.receive(proof)
    assert a.receive(last) == b""
    return [hello, answer, proof, last]


HELLO, ANSWER, PROOF, LAST = messages(connecting(), accepting())


def hello(**changed: object) -> bytes:
    fields = json.loads(HELLO[8:]) | changed
    return frame({name: value for name, value in fields.items() if value != "left out"})


def fails(end: End, data: bytes) -> ProtocolError:
    """The error with which ``data`` makes ``end`` fail for good."""
    with pytest.raises(ProtocolError) as caught:
        end.receive(data)
    with pytest.raises(type(caught.value), match=r"^"):
        end.receive(LAST)
    assert end.peer is None
    assert not end.done
    assert end.rest == b""
    assert SECRET.decode() not in str(caught.value)
    return caught.value


# -- two ends that know each other -----------------------------------------------------------------


def test_each_end_learns_who_the_other_is_but_not_before_its_proof() -> None:
    a, b = connecting(), accepting()
    assert b.start() == b""
    answer = b.receive(a.start())
    proof = a.receive(answer)
    assert a.peer is None
    assert b.peer is None
    last = b.receive(proof)
    assert (b.peer, b.done) == (A, True)
    assert (a.peer, a.done) == (None, False)
    assert a.receive(last) == b""
    assert (a.peer, a.done) == (B, True)
    assert (a.refusal, b.refusal) == (b"", b"")


def test_an_accepting_end_proves_nothing_to_who_has_proved_nothing() -> None:
    assert b"proof" not in ANSWER
    assert b"proof" in LAST


@given(st.lists(st.integers(0, 300), max_size=40), st.binary(max_size=20))
def test_pieces_of_any_size_give_the_same(sizes: list[int], after: bytes) -> None:
    for end, data, sent in (
        (accepting(), HELLO + PROOF + after, ANSWER + LAST),
        (connecting(), ANSWER + LAST + after, PROOF),
    ):
        said, position = b"", 0
        for size in [*sizes, len(data)]:
            said += end.receive(data[position : position + size])
            position += size
        assert said == sent
        assert end.done
        assert end.rest == after


def test_what_comes_after_the_end_is_kept_as_it_is() -> None:
    end = connecting()
    end.receive(ANSWER)
    end.receive(LAST + b"RLY1")
    end.receive(b"\xff")
    assert end.rest == b"RLY1\xff"


# -- strangers -------------------------------------------------------------------------------------


def test_another_secret_is_not_believed_on_either_side() -> None:
    guess = b"not the job's secret"
    a, b = Connecting(guess, A, b"c" * 32), accepting()
    proof = a.receive(b.receive(a.start()))
    error = fails(b, proof)
    assert isinstance(error, AuthenticationError)
    assert "the two processes do not share a secret: start both in one job" in str(error)
    refused = fails(a, b.refusal)
    assert isinstance(refused, AuthenticationError)
    assert "the accepting process refused the connection: 'the two processes do not share" in str(
        refused
    )
    assert a.refusal == b""

    # A false accepting end that takes whatever proof it gets.
    a, b = connecting(), Accepting(guess, B, b"d" * 32)
    b._proof_of = lambda role: Accepting._proof_of(b, role) if role == "accepting" else taken  # type: ignore[method-assign]
    proof = a.receive(b.receive(a.start()))
    taken = json.loads(proof[8:])["proof"]
    last = b.receive(proof)
    assert b.done
    assert isinstance(fails(a, last), AuthenticationError)


@pytest.mark.parametrize("count", [1, 2])
def test_a_recorded_handshake_is_worth_nothing_later(count: int) -> None:
    later = Accepting(SECRET, B, b"e" * 32)
    later.receive(HELLO)
    assert isinstance(fails(later, PROOF), AuthenticationError)
    again = Connecting(SECRET, A, b"f" * 32)
    again.receive(ANSWER)
    assert isinstance(fails(again, [PROOF, LAST][count - 1]), AuthenticationError)


def test_our_own_messages_sent_back_are_refused() -> None:
    assert "it may be our own, sent back" in str(fails(connecting(), HELLO))
    end = connecting()
    proof = end.receive(ANSWER)
    assert isinstance(fails(end, proof), AuthenticationError)
    # Even where the stranger makes the hello fit: a proof as "connecting" is not a proof as "accepting".
    end = connecting()
    proof = end.receive(frame(json.loads(HELLO[8:]) | {"role": "accepting"}))
    assert isinstance(fails(end, proof), AuthenticationError)
    end = accepting()
    end.receive(HELLO)
    assert isinstance(fails(end, LAST), AuthenticationError)


def test_hellos_that_were_swapped_between_connections_do_not_fit() -> None:
    """Two true ends, but each was shown another hello from the other."""
    b = accepting()
    b.receive(hello(me=A | {"name": "somebody else"}))
    assert isinstance(fails(b, PROOF), AuthenticationError)
    a = connecting()
    a.receive(frame(json.loads(ANSWER[8:]) | {"me": B | {"transports": ["none"]}}))
    assert isinstance(fails(a, LAST), AuthenticationError)


def test_any_bit_that_is_flipped_is_refused_or_leaves_the_end_waiting() -> None:
    for end, before, message in (
        (accepting, b"", HELLO),
        (accepting, HELLO, PROOF),
        (connecting, b"", ANSWER),
        (connecting, ANSWER, LAST),
    ):
        for position in range(len(message) * 8):
            flipped = bytearray(message)
            flipped[position // 8] ^= 1 << position % 8
            there = end()
            if before:
                there.receive(before)
            try:
                there.receive(bytes(flipped))
                # Both true ends go on: the one that saw a changed hello makes, and expects, another proof.
                there.receive(PROOF if end is accepting else LAST)
            except ProtocolError:
                pass
            assert there.peer is None, (message, position)
            assert not there.done


@pytest.mark.parametrize("odd", ["\ud800" * 64, "", "é" * 64, None, 5, ["x"]])
def test_a_proof_that_is_no_proof_is_refused(odd: object) -> None:
    end = accepting()
    end.receive(HELLO)
    fails(end, frame({"proof": odd}))


def test_a_proof_says_nothing_else() -> None:
    end = accepting()
    end.receive(HELLO)
    assert "is not a proof" in str(fails(end, frame(json.loads(PROOF[8:]) | {"more": 1})))


def mutations(seed: int) -> Iterator[bytes]:
    """What a broken or hostile peer may send: true messages that are cut, doubled, mixed or given other lengths."""
    chance = random.Random(seed)
    true = [HELLO, ANSWER, PROOF, LAST, frame({"refused": "no"})]
    for _ in range(12):
        data = bytearray(chance.choice(true))
        match chance.randrange(6):
            case 0:
                del data[chance.randrange(len(data)) :]
            case 1:
                place = chance.randrange(len(data))
                data[place:place] = chance.randbytes(chance.randrange(1, 9))
            case 2:
                data[4:8] = chance.randrange(2 ** chance.choice([4, 9, 14, 32])).to_bytes(
                    4, "little"
                )
            case 3:
                place = chance.randrange(len(data))
                del data[place : place + chance.randrange(1, 9)]
            case 4:
                fields = json.loads(data[8:])
                name = chance.choice(list(fields))
                odd = [None, 0, -1, True, 1e400, "", "\ud800", [], {}, [[[]]], 10**300]
                fields[name] = chance.choice(odd)
                data = bytearray(frame(fields))
            case _:
                data = bytearray(frame(chance.randbytes(chance.randrange(40))))
        yield bytes(data)


@given(st.integers(0, 2**32), st.sampled_from([connecting, accepting]))
def test_no_mixture_of_messages_gets_a_stranger_in(seed: int, make: partial[End]) -> None:
    end = make()
    try:
        for data in mutations(seed):
            end.receive(data)
    except ProtocolError:
        pass
    assert str(end.ended()).isprintable()
    assert end.peer is None
    assert not end.done


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)
fields = st.sampled_from(["version", "role", "nonce", "me", "proof", "refused", "job"])


@given(
    st.lists(
        st.binary(max_size=64)
        | st.binary(max_size=64).map(frame)
        | st.dictionaries(fields, json_values).map(frame)
        | st.dictionaries(fields, json_values).map(lambda odd: hello(**odd)),
        max_size=5,
    ),
    st.sampled_from([connecting, accepting]),
)
def test_random_bytes_raise_nothing_else_and_are_never_believed(
    pieces: list[bytes], make: partial[End]
) -> None:
    end = make()
    try:
        for piece in pieces:
            end.receive(piece)
    except ProtocolError:
        pass
    assert str(end.ended()).isprintable()
    assert len(end.refusal) <= MAX_HANDSHAKE
    assert end.peer is None
    assert not end.done


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            b"GET / HTTP/1.1\r\n",
            r"began a message with b'GET / HT' instead of b'RLY1'.*another program",
        ),
        (b"R\x00", "another program"),
        (
            b"RLY1\xff\xff\xff\xff",
            "announced a message of 4294967295 bytes, but the limit before authentication is 8192",
        ),
        (frame(b"[" * 8000), "is not a JSON object"),
        (frame(b"9" * 8000), "is not a JSON object"),
        (frame(b"[1]"), "is not a JSON object"),
        (frame('{"version": 1}'.encode("utf-16")), "is not a JSON object"),
        (frame(b"\xff"), "is not a JSON object"),
        (frame(b""), "is not a JSON object"),
        (frame({"proof": "0" * 64}), "has no version"),
        (
            hello(version=3),
            "speaks version 3 of the handshake, the accepting one version 2: install",
        ),
        (hello(version=0), "speaks version 0"),
        (hello(version=True), "has no version"),
        (frame({"version": 7, "anything": "else"}), "speaks version 7"),
        (hello(nonce="ab"), "no nonce of at least 16 bytes"),
        (hello(nonce=5), "no nonce"),
        (hello(me=[]), "does not introduce its sender"),
        (hello(me="left out"), "does not have the fields"),
        (hello(more=1), "does not have the fields"),
    ],
)
def test_what_is_no_handshake_is_told_apart(data: bytes, words: str) -> None:
    end = accepting()
    with pytest.raises(ProtocolError, match=words):
        end.receive(data)
    assert end.peer is None


def test_a_message_that_is_too_long_is_refused_before_it_is_there() -> None:
    end = accepting()
    assert "authentication is 8192" in str(
        fails(end, b"RLY1" + (MAX_HANDSHAKE + 1).to_bytes(4, "little"))
    )


def test_the_other_end_hears_why_it_was_refused() -> None:
    a, b = Connecting(SECRET, A | {"job": "y", "generation": 3}, b"c" * 32), accepting()
    error = fails(b, a.start())
    assert (
        "the connecting process belongs to job 'y' generation 3, not to job 'x' generation 2"
        in str(error)
    )
    assert "two jobs use the same address" in str(error)
    assert "belongs to job 'y' generation 3, not to job 'x'" in str(fails(a, b.refusal))


@pytest.mark.parametrize(
    ("me", "words"),
    [
        (A | {"generation": 1}, "generation 1, not to job 'x' generation 2: .*left over"),
        (A | {"generation": 2.0}, "of the wrong type"),
        (A | {"generation": True}, "generation True"),
        (A | {"job": None}, "job None"),
        (A | {"job": ["x"]}, "of the wrong type"),
        ({}, "job None generation None"),
        (A | {"job": "y\n\x1b[2J" + "\u202e" * 300}, r"job 'y\?\?\[2J\?{190,200}\.\.\.' gen"),
    ],
)
def test_another_job_or_generation_is_refused_before_any_proof(me: object, words: str) -> None:
    with pytest.raises(AuthenticationError, match=words):
        accepting().receive(hello(me=me))


def test_the_connecting_end_refuses_another_job_too() -> None:
    a, b = connecting(), Accepting(SECRET, B | {"generation": 1}, b"b" * 32)
    b._generation = 2
    answer = b.receive(a.start())
    assert "the accepting process belongs to job 'x' generation 1" in str(fails(a, answer))
    assert "belongs to" in str(fails(b, a.refusal))


def test_a_strangers_refusal_is_quoted_short_and_gets_no_answer() -> None:
    end = connecting()
    error = fails(end, frame({"refused": "no\n\x1b[31m" + "!" * 5000}))
    assert isinstance(error, AuthenticationError)
    assert "refused the connection: 'no??[31m!!!" in str(error)
    assert len(str(error)) < 300
    assert end.refusal == b""
    assert isinstance(fails(accepting(), frame({"refused": [1]})), AuthenticationError)


def test_a_connection_that_ends_early_has_its_own_words() -> None:
    end = connecting()
    end.receive(ANSWER)
    assert "the accepting process closed the connection during" in str(end.ended())
    fails(end, LAST[:-2] + b"0}")
    assert "is no" in str(end.ended())


# -- what one's own side can get wrong -------------------------------------------------------------


@pytest.mark.parametrize("make", [Connecting, Accepting])
def test_settings_that_cannot_work_are_named(make: type[End]) -> None:
    with pytest.raises(ConfigError, match=r"^secret: has 15 bytes, expected at least 16") as caught:
        make(b"fifteen bytes!!", A, b"n" * 32)
    assert "fifteen" not in str(caught.value)
    assert "fifteen" not in repr(caught.value)
    make(b"sixteen bytes!!!", A, b"n" * 32)
    with pytest.raises(ConfigError, match="nonce: has 3 bytes"):
        make(SECRET, A, b"abc")
    for me in ({}, A | {"generation": True}, A | {"generation": "2"}, A | {"job": 1}):
        with pytest.raises(ConfigError, match="expected the job's name as 'job'"):
            make(SECRET, me, b"n" * 32)
    for odd in (object(), float("nan"), b"bytes"):
        with pytest.raises(ConfigError, match="cannot be written as JSON"):
            make(SECRET, A | {"odd": odd}, b"n" * 32)
    with pytest.raises(
        ConfigError,
        match=r"me: makes a message of \d+ bytes, but the limit before authentication is 8192",
    ):
        make(SECRET, A | {"long": "x" * MAX_HANDSHAKE}, b"n" * 32)


def test_the_secret_shows_nowhere() -> None:
    for end in (connecting(), accepting()):
        assert "secret" not in repr(end)
    assert SECRET not in HELLO + ANSWER + PROOF + LAST
