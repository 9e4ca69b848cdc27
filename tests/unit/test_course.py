"""Where a script is in its loops: whatever is lost, and when, each step and function takes effect once, in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

from hypothesis import given, settings, strategies as st

from rallypoint.elastic.loops.course import Course, Doing
from rallypoint.elastic.loops.own_state import OwnState
from rallypoint.elastic.loops.rng import RandomState


NO_RANDOM = cast("RandomState", None)
BEGUN = cast("RandomState", object())  # of an iteration
STEP, TASK = "step", "function"
Bodies = list[list[str]]


@dataclass
class Script:
    """A training script: epochs with functions before and after loops over batches; each batch has its own body.

    Args:
        epochs: how many.
        before, behind: how many functions before the loops, and after each of them.
        loops: for each loop, what each batch's body does.
        breaks: loops that are left after their first batch's body.
        losses: before which effects a loss strikes; the repetition succeeds.
        snapshots: with sharded state, a snapshot every so many steps; 0: the state is replicated.
    """

    epochs: int
    before: int
    behind: int
    loops: list[Bodies]
    breaks: frozenset[int] = frozenset()
    losses: set[int] = field(default_factory=set)
    snapshots: int = 0
    course: Course = field(default_factory=Course)
    effects: list[tuple[Any, ...]] = field(default_factory=list)
    owns: list[OwnState] = field(default_factory=list)  # what is kept at the start of each step

    def run(self) -> None:
        course = self.course
        for epoch in range(course.place.epoch, self.epochs):
            course.begin_epoch()
            for number in range(self.before):
                self.function(epoch, "before", number)
            for number in range(len(self.loops)):
                self.loop(epoch, number)
                for each in range(self.behind):
                    self.function(epoch, number, "behind", each)
            course.end_epoch(epoch)

    def loop(self, epoch: int, loop: int) -> None:
        course, bodies = self.course, self.loops[loop]
        if course.begin_loop():
            return
        batches = self.begin(bodies)
        while True:
            if course.approach_batch():
                self.keep_snapshot()
            batch = next(batches, None)
            if batch is None:
                break
            if done := course.begin_body():
                course.rehearse(done)
            assert course.is_rehearsing is bool(done)
            self.body(bodies[batch], epoch, loop, batch)
            while course.repeats:
                if done := course.begin_body_again():
                    course.rehearse(done)
                self.body(bodies[batch], epoch, loop, batch)
            if loop in self.breaks and not course.is_void:
                break
            if not course.end_body():
                batches = self.begin(bodies)
        course.end_batches()

    def begin(self, bodies: Bodies) -> Any:
        own = self.course.begin_batches()
        if own is None or own.place.begun is None:
            self.course.begin_at_first_batch(BEGUN, (), ())
            return iter(range(len(bodies)))
        return iter(range(own.place.batch, len(bodies)))

    def body(self, body: list[str], *where: int) -> None:
        for number, what in enumerate(body):
            if what == STEP:
                self.step(*where, number)
            else:
                self.function(*where, number)

    def step(self, *name: Any) -> None:
        was_done = False
        if self.course.of_step() is Doing.REHEARSE:
            self.course.note_rehearsed()
        else:
            was_done = self.attempt(name, is_task=False)
        assert self.course.is_rehearsing is not was_done

    def function(self, *name: Any) -> None:
        doing = self.course.of_task()
        if doing is Doing.REHEARSE:
            self.course.note_rehearsed()
        while doing is Doing.RUN:
            assert self.course.of_step() is Doing.RUN
            was_done = self.attempt(name, is_task=True)
            assert self.course.is_rehearsing is not was_done
            if was_done or self.course.is_back:
                return
        assert self.course.is_rehearsing

    def attempt(self, name: tuple[Any, ...], *, is_task: bool) -> bool:
        course = self.course
        own = OwnState(course.steps, course.place, NO_RANDOM, is_task=is_task)
        if len(self.owns) == course.steps:
            self.owns.append(own)
        if len(self.effects) in self.losses:
            self.losses.discard(len(self.effects))
            before = course.steps
            self.go_back()
            course.note_loss(before, is_task=is_task, goes_back=bool(self.snapshots))
            return False
        self.effects.append(name)
        course.note_complete(is_task=is_task)
        return True

    # -- sharded state: effects are undone, too -----------------------------------------------------

    snapshot: OwnState | None = None

    def keep_snapshot(self) -> None:
        last = -self.snapshots if self.snapshot is None else self.snapshot.steps
        course = self.course
        if self.snapshots and course.steps - last >= self.snapshots:
            self.snapshot = OwnState(course.steps, course.place, NO_RANDOM)

    def go_back(self) -> None:
        own, course = self.snapshot, self.course
        if self.snapshots and own is not None and course.in_batches and own.steps != course.steps:
            course.go_back(own)
            course.steps = own.steps
            del self.effects[own.steps :]


scripts = st.builds(
    Script,
    epochs=st.integers(1, 3),
    before=st.integers(0, 2),
    behind=st.integers(0, 2),
    loops=st.lists(
        st.lists(st.lists(st.sampled_from([STEP, TASK]), max_size=4), max_size=4), max_size=3
    ),
    breaks=st.frozensets(st.integers(0, 2)),
)


def undisturbed(script: Script) -> Script:
    calm = replace(script, losses=set(), course=Course(), effects=[], owns=[])
    calm.run()
    assert len(calm.effects) == calm.course.steps
    return calm


@given(scripts, st.sets(st.integers(0, 30)))
@settings(max_examples=100, deadline=None)
def test_a_survivor_repeats_what_was_lost_and_nothing_else(script: Script, at: set[int]) -> None:
    calm = undisturbed(script)
    script.losses = at
    script.run()
    assert script.effects == calm.effects
    assert script.course.steps == calm.course.steps


@given(scripts, st.data())
@settings(max_examples=100, deadline=None)
def test_a_newcomer_begins_where_the_lost_one_was(script: Script, data: st.DataObject) -> None:
    calm = undisturbed(script)
    if not calm.owns:
        return
    own = data.draw(st.sampled_from(calm.owns))
    script.course.continue_at(own)
    script.course.steps = own.steps
    # It may be lost and replaced again, and others too.
    script.losses = data.draw(st.sets(st.integers(0, 10)))
    script.run()
    assert script.effects == calm.effects[own.steps :]
    assert script.course.steps == calm.course.steps


@given(
    bodies=st.lists(
        st.lists(st.sampled_from([STEP, TASK]), min_size=1, max_size=4), min_size=1, max_size=6
    ),
    every=st.integers(1, 6),
    at=st.sets(st.integers(0, 25)),
)
@settings(max_examples=100, deadline=None)
def test_with_sharded_state_all_go_back_to_a_snapshot(
    bodies: Bodies, every: int, at: set[int]
) -> None:
    script = Script(1, 0, 0, [bodies], snapshots=every)
    calm = undisturbed(script)
    script.losses = at
    script.run()
    assert script.effects == calm.effects
    assert script.course.steps == calm.course.steps


def test_a_loop_of_ones_own_is_rehearsed_up_to_the_function_that_was_under_way() -> None:
    course = Course()
    for is_task in (False, False, True, False):
        course.note_complete(is_task=is_task)
    own = OwnState(course.steps, course.place, NO_RANDOM, is_task=True)
    newcomer = Course()
    assert newcomer.continue_at(own)
    newcomer.steps = own.steps
    assert newcomer.of_step() is Doing.REHEARSE and not newcomer.note_rehearsed()
    assert newcomer.of_task() is Doing.RUN
    assert newcomer.of_step() is Doing.RUN
    assert newcomer.steps == own.steps
