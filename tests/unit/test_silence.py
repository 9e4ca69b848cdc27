"""When a host is gone, judging by what the kernel says about a connection."""

import socket
import struct

from hypothesis import given, strategies as st

from rallypoint.wire.silence import INFO_SIZE, LOOKS, Silence, TcpState


LIMIT = 5.0
EACH = LIMIT / LOOKS


def looks(*states: TcpState, every: float = EACH) -> list[bool]:
    silence = Silence(LIMIT)
    return [silence.is_gone(100.0 + number * every, each) for number, each in enumerate(states)]


def owing(number: int, answered: int = -1) -> TcpState:
    """In look ``number``, something is unacknowledged; the last answer came in look ``answered``."""
    return TcpState(0, 1, (number - answered) * EACH)


def test_a_host_that_owes_an_answer_for_the_whole_time_is_gone() -> None:
    found = looks(*(owing(number) for number in range(LOOKS + 2)))
    assert found.index(True) == LOOKS


def test_a_window_that_is_shut_for_hours_is_no_silence() -> None:
    """Nothing is unacknowledged, and each probe is answered; some are in flight when we look."""
    found = looks(*(TcpState(number % 2, 0, 0.5 * EACH) for number in range(1000)))
    assert not any(found)


def test_who_is_asked_nothing_owes_nothing() -> None:
    assert not any(looks(*(TcpState(0, 0, 3600.0 + number) for number in range(1000))))


def test_a_host_that_vanishes_while_its_window_is_shut_is_gone() -> None:
    shut = [TcpState(0, 0, 0.0)] * 20
    found = looks(*shut, *(TcpState(1, 0, (number + 1) * EACH) for number in range(LOOKS + 2)))
    assert found.index(True) == 20 + LOOKS


def test_a_late_look_is_this_process_standing_still() -> None:
    assert not any(looks(*(TcpState(0, 1, 1e6) for _ in range(3)), every=3600.0))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_it_is_gone_only_after_looks_in_a_row_without_an_answer(story) -> None:
    silence, last, run = Silence(LIMIT), -1, 0
    for number, (owes, answers) in enumerate(story):
        if answers:
            last = number
        state = TcpState(0, int(owes), (number - last) * EACH + (0.1 if answers else 0.2))
        run = run + 1 if owes and not answers else 0
        if silence.is_gone(100.0 + number * EACH, state):
            assert run >= LOOKS


def test_the_kernel_tells_what_has_not_been_acknowledged() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as ours, server.accept()[0] as theirs:
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"
            info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_SIZE)
            assert len(info) == INFO_SIZE
            state = TcpState.parse(info)
            assert (state.probes, state.unacked) == (0, 0)
            assert 0.0 <= state.quiet < 60.0


def test_where_the_fields_lie() -> None:
    """struct tcp_info: eight bytes, the fourth of which is tcpi_probes; then 32-bit numbers."""
    numbers = list(range(100, 113))
    info = struct.pack("=8B13I", 1, 2, 3, 4, 5, 6, 7, 8, *numbers)
    assert TcpState.parse(info) == TcpState(4, 104, 0.111)
