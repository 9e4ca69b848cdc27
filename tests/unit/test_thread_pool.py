"""An agent's threads: which one leads while a job is long, waits or fails; how many work; and that all of them end."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pace import pace
from rallypoint.rpc.threads.thread_pool import TICK, Answer, Job, ThreadPool


class Act:
    """A job."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def run(self) -> None:
        self._act()


class Reply(Act, Answer):
    """An answer that others wait for."""


class Callback(Reply):
    """An answer that may itself wait."""

    may_wait = True


class Inbox:
    """The source of jobs, as the poller is for an agent."""

    def __init__(self) -> None:
        self._come: deque[Job] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self.polling: set[str] = set()
        self.most_polling = 0
        self.flushes = 0

    def put(self, *acts: Callable[[], None]) -> None:
        with self._changed:
            self._come.extend(Act(each) for each in acts)
            self._changed.notify()

    def poll(self, jobs: deque[Job]) -> None:
        me = threading.current_thread().name
        self.polling.add(me)
        self.most_polling = max(self.most_polling, len(self.polling))
        with self._changed:
            self._changed.wait_for(lambda: self._come or self._woken)
            self._woken = False
            jobs.extend(self._come)
            self._come.clear()
        self.polling.discard(me)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def flush(self) -> None:
        self.flushes += 1


def never_due(_: float) -> None:
    return None


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it has not come about"
        time.sleep(0.001)


class Place:
    def __init__(self, limit: int, due: Callable[[float], float | None] = never_due) -> None:
        self.inbox = Inbox()
        self.pool = ThreadPool("test", limit, self.inbox, due)
        self.pool.start()
        self.done: list[Any] = []
        self.gates: list[threading.Event] = []

    def gate(self) -> threading.Event:
        """An event that is set when the test is over, whatever happens."""
        made = threading.Event()
        self.gates.append(made)
        return made

    def note(self, what: Any) -> Callable[[], None]:
        return lambda: self.done.append(what)

    def noted(self, *what: Any) -> None:
        eventually(lambda: self.done == list(what))

    def close(self) -> None:
        for each in self.gates:
            each.set()
        assert self.pool.close(5)


@pytest.fixture
def make() -> Iterator[Callable[..., Place]]:
    before = set(threading.enumerate())
    places: list[Place] = []

    def made(limit: int = 4, **more: Any) -> Place:
        places.append(Place(limit, **more))
        return places[-1]

    yield made
    for place in places:
        place.close()
        assert place.inbox.most_polling == 1, "two threads led at once"
    eventually(lambda: set(threading.enumerate()) <= before)


def test_short_jobs_are_all_done_by_one_thread_in_their_order(make):
    place = make()
    names = set()

    def job(number: int) -> Callable[[], None]:
        def act() -> None:
            names.add(threading.current_thread().name)
            place.done.append(number)

        return act

    for number in range(200):
        place.inbox.put(job(number))
    place.noted(*range(200))
    # Under load a job may seem long, so that a second thread leads.
    assert len(names) <= 3


def test_a_job_that_turns_out_long_loses_the_lead_and_is_still_done(make):
    place = make()
    gate = place.gate()

    def long_job() -> None:
        assert place.pool.leads()
        place.done.append("begun")
        gate.wait(10)
        assert not place.pool.leads()
        place.done.append("long")

    place.inbox.put(long_job)
    eventually(lambda: place.done == ["begun"])
    began = time.monotonic()
    place.inbox.put(place.note("short"))
    place.noted("begun", "short")
    assert time.monotonic() - began < 200 * pace() * TICK, "the overseer looks every tick"
    gate.set()
    place.noted("begun", "short", "long")


def test_a_job_behind_a_long_one_that_came_with_it_does_not_wait_for_it(make):
    place = make()
    gate = place.gate()
    place.inbox.put(lambda: gate.wait(10), place.note("second"), place.note("third"))
    place.noted("second", "third")


def test_one_that_waits_gives_the_lead_up_at_once(make):
    place = make()
    gate = place.gate()
    times = []

    def waits() -> None:
        pool = ThreadPool.current()
        assert pool is place.pool
        times.append(time.monotonic())
        with pool.waiting(), pool.waiting():  # nested, it counts once
            gate.wait(10)
        place.done.append("waited")

    place.inbox.put(waits, lambda: times.append(time.monotonic()))
    eventually(lambda: len(times) == 2)
    gate.set()
    place.noted("waited")


def test_no_more_work_at_once_than_the_limit_and_those_that_wait_do_not_count(make):
    place = make(limit=2)
    gate, waits_over = place.gate(), place.gate()
    working = [0, 0]
    lock = threading.Lock()

    def works() -> None:
        with lock:
            working[0] += 1
            working[1] = max(working)
        gate.wait(10)
        with lock:
            working[0] -= 1
        place.done.append("worked")

    def waits() -> None:
        with place.pool.waiting():
            place.done.append("waits")
            waits_over.wait(10)
        place.done.append("waited")

    for _ in range(10):
        place.inbox.put(waits)
    eventually(lambda: place.done.count("waits") == 10)
    assert place.pool._working == 0
    for _ in range(6):
        place.inbox.put(works)
    eventually(lambda: working[0] == 2 and place.pool.counts()[1] == 4)
    assert working == [2, 2]
    gate.set()
    eventually(lambda: place.done.count("worked") == 6)
    waits_over.set()
    eventually(lambda: place.done.count("waited") == 10)
    eventually(lambda: place.pool._working == 0)


def test_an_answer_does_not_wait_in_line_behind_those_who_wait_for_it(make):
    place = make(limit=1)
    gate = place.gate()
    place.inbox.put(lambda: gate.wait(10), place.note("in line"))
    eventually(lambda: place.pool.counts()[1] == 1)
    place.pool.lead(lambda jobs: jobs.extend([Reply(place.note("answer")), Reply(gate.set)]))
    place.noted("answer", "in line")


def test_of_answers_that_wait_themselves_as_many_as_the_limit_run_beside_the_others(make):
    place = make(limit=2)
    gate = place.gate()

    def waits() -> None:
        place.done.append("waits")
        gate.wait(10)

    place.inbox.put(waits, waits)
    place.noted("waits", "waits")
    place.pool.lead(lambda jobs: jobs.extend(Callback(waits) for _ in range(3)))
    place.noted("waits", "waits", "waits", "waits")
    place.pool.lead(lambda jobs: jobs.append(Reply(place.note("answer"))))
    eventually(lambda: "answer" in place.done)
    assert (place.done.count("waits"), place.pool.counts()[1]) == (4, 1)
    gate.set()
    eventually(lambda: place.done.count("waits") == 5)
    eventually(lambda: place.pool._working == 0 and not place.pool._answering)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_leader_counts_and_passes_nobody_who_waits_in_line(make, limit):
    place = make(limit)
    at_work: set[int] = set()
    most = []
    order: list[int] = []

    def job(number: int) -> Callable[[], None]:
        def act() -> None:
            if number % 3 == 0 and place.pool.leads():
                place.pool.submit(Act(act))
                return
            order.append(number)
            at_work.add(number)
            most.append(len(at_work))
            if number % 7 == 0:
                time.sleep(TICK / 5)
            elif number % 41 == 0:
                time.sleep(2 * TICK)
            at_work.discard(number)
            place.done.append(number)

        return act

    for number in range(600):
        place.inbox.put(job(number))
        if number % 10 == 0:
            time.sleep(0)
    eventually(lambda: len(place.done) == 600, 20)
    assert max(most) <= limit
    if limit == 1:
        assert order == list(range(600))


def test_jobs_of_other_threads_are_done_by_workers_never_by_the_leader(make):
    place = make()
    led = []
    for _ in range(50):
        place.pool.submit(Act(lambda: led.append(place.pool.leads())))
    eventually(lambda: len(led) == 50)
    assert not any(led)


def test_a_job_hands_itself_to_a_worker(make):
    place = make()
    gate = place.gate()

    def hands_over() -> None:
        assert place.pool.leads()
        place.pool.submit(Act(lambda: gate.wait(10)))

    place.inbox.put(hands_over, place.note("next"))
    place.noted("next")


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_job_that_fails_ends_no_thread(make, error, caplog):
    place = make(limit=2)

    def fails() -> None:
        raise error("a mistake")

    for _ in range(10):
        place.inbox.put(fails)
        place.pool.submit(Act(fails))
    place.inbox.put(place.note("after"))
    place.pool.submit(Act(place.note("after")))
    place.noted("after", "after")
    eventually(lambda: place.pool._working == 0)
    assert "please report this bug" in caplog.text


def test_what_a_job_held_goes_when_it_is_done(make):
    import weakref

    class Large:
        def run(self) -> None:
            return

    place = make()
    for put in (lambda job: place.inbox.put(job.run), place.pool.submit):
        job = Large()
        gone = weakref.ref(job)
        put(job)
        del job
        eventually(lambda gone=gone: gone() is None)


def test_what_was_held_back_is_sent_before_the_leader_waits_again(make):
    place = make()
    gate = place.gate()
    place.inbox.put(place.note(1))
    place.noted(1)
    eventually(lambda: place.inbox.polling)
    assert place.inbox.flushes
    # Also what was held back by a job that lost the lead in the meantime.
    place.inbox.put(lambda: gate.wait(10))
    eventually(lambda: place.inbox.polling)
    flushes = place.inbox.flushes
    gate.set()
    eventually(lambda: place.inbox.flushes > flushes)


def test_the_overseer_calls_when_something_is_due_and_not_long_before(make):
    calls: list[float] = []
    following: list[float | None] = []

    def due(now: float) -> float | None:
        calls.append(now)
        return following.pop() if following else None

    place = make(due=due)
    began = time.monotonic()
    following.append(began + 0.1)
    place.pool.wake_at(began + 0.05)
    place.pool.wake_at(began + 30)
    eventually(lambda: len(calls) == 2)
    assert 0.05 <= calls[0] - began < 0.5 * pace()
    assert 0.1 <= calls[1] - began < 0.8 * pace()
    # After a long quiet time the overseer sleeps, and is woken.
    time.sleep(40 * TICK)
    place.pool.wake_at(time.monotonic() + 0.02)
    eventually(lambda: len(calls) == 3)


def test_a_crew_with_nothing_to_do_costs_next_to_nothing(make):
    place = make()
    place.inbox.put(place.note(1))
    place.noted(1)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


def test_close_ends_all_threads_but_those_in_the_middle_of_a_job(make):
    place = make()
    gate = place.gate()
    place.inbox.put(lambda: gate.wait(10))
    eventually(lambda: place.inbox.polling)
    place.pool.submit(Act(lambda: gate.wait(10)))
    eventually(lambda: place.pool._working == 2)
    began = time.monotonic()
    assert not place.pool.close(0.1)
    assert time.monotonic() - began < 1 * pace()
    left = [each.name for each in threading.enumerate() if each.name.startswith("test")]
    assert len(left) == 2
    gate.set()
    assert place.pool.close(5)


def test_what_was_in_line_when_it_closed_is_handed_back(make):
    place = make(limit=1)
    gate = place.gate()
    place.pool.submit(Act(lambda: gate.wait(10)))
    eventually(lambda: place.pool._working == 1)
    left = [Act(place.note(number)) for number in range(3)]
    for each in left:
        place.pool.submit(each)
    assert not place.pool.close(0.1)
    assert place.pool.take_left() == left
    assert place.pool.take_left() == []
    gate.set()


def test_a_job_may_close_its_own_crew(make):
    place = make()
    result = []
    place.inbox.put(lambda: result.append(place.pool.close(5)))
    eventually(lambda: result == [True])


def test_under_load_from_everywhere_every_job_is_done_once(make):
    place = make(limit=3)
    done: deque[int] = deque()

    def job(number: int) -> Callable[[], None]:
        def act() -> None:
            if number % 7 == 0:
                with place.pool.waiting():
                    time.sleep(0.001)
            elif number % 31 == 0:
                time.sleep(2 * TICK)
            done.append(number)

        return act

    def feed(first: int) -> None:
        for number in range(first, 900, 3):
            if number % 2:
                place.inbox.put(job(number))
            else:
                place.pool.submit(Act(job(number)))

    threads = [threading.Thread(target=feed, args=(first,)) for first in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    eventually(lambda: len(done) == 900, 20)
    assert sorted(done) == list(range(900))
    eventually(lambda: place.pool._working == 0)
    assert place.pool.counts()[1] == 0
