"""Questions to several places: one that does not answer delays no other, and no place is asked twice at once."""

import contextlib
import threading

from rallypoint.rendezvous.backends.places import Answer, Place
from rallypoint.rendezvous.backends.questions import Questions


_QUICK, _SLOW = Place("quick", 1), Place("slow", 2)


def test_an_answer_comes_while_another_place_is_silent() -> None:
    release, asked = threading.Event(), []

    def ask(place: Place) -> Answer:
        asked.append(place)
        if place == _SLOW:
            assert release.wait(20)
        return Answer.ALIVE

    with contextlib.closing(Questions(ask, 2)) as questions:
        questions.put([_SLOW, _QUICK])
        assert questions.answers(20) == {_QUICK: Answer.ALIVE}
        questions.put([_SLOW, _QUICK])
        assert questions.answers(20) == {_QUICK: Answer.ALIVE}
        assert asked.count(_SLOW) == 1
        assert questions.answers(0) == {}
        release.set()
        assert questions.answers(20) == {_SLOW: Answer.ALIVE}


def test_without_a_question_nothing_is_waited_for() -> None:
    with contextlib.closing(Questions(lambda _: Answer.DEAD, 1)) as questions:
        assert questions.answers(3600) == {}
