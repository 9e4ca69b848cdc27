"""Which lines of a stack a report shows."""

from __future__ import annotations

from hypothesis import given, strategies as st

from rallypoint.launch.output import stack_lines


LIBRARY = "/env/lib/python3.11/site-packages/torch/nn/module.py"


def frame(path: str, line: int, code: str) -> list[str]:
    return [f'  File "{path}", line {line}, in f', f"    {code}"]


def traceback(*frames: list[str]) -> str:
    lines = [stack_lines.BEGINNING, *(line for each in frames for line in each)]
    return "\n".join([*lines, "ValueError: bad", "  over two lines"])


def test_a_short_stack_is_shown_as_it_is() -> None:
    script = [*frame("/home/a/train.py", 8, "step(x)"), "    ^^^^^^^"]
    assert stack_lines.of(traceback(script), 14) == script


def test_the_user_s_own_lines_stay_and_those_of_packages_go() -> None:
    script = [*frame("/home/a/train.py", 8, "step(x)"), "    ^^^^^^^"]
    inside = [frame(LIBRARY, number, "return call()") for number in range(10)]
    own = frame("/home/a/model.py", 31, "return self.last(x)")
    shown = stack_lines.of(traceback(script, *inside, own, *inside), 10)
    assert shown == [
        *script[:2],
        "… 20 lines left out",
        *own,
        "… 16 lines left out",
        *inside[-2],
        *inside[-1],
    ]


def test_of_many_own_frames_the_inner_ones_stay() -> None:
    deep = [frame("/home/a/walk.py", number, "walk(child)") for number in range(50)]
    shown = stack_lines.of(traceback(*deep), 7)
    assert shown == ["… 94 lines left out", *deep[-3], *deep[-2], *deep[-1]]


def test_frames_of_an_exception_group_are_found_behind_their_bar() -> None:
    lines = ["  + Exception Group Traceback (most recent call last):"]
    lines += [f"  | {line}" for number in range(9) for line in frame(LIBRARY, number, "call()")]
    lines += [f"  | {line}" for line in frame("/home/a/train.py", 8, "step(x)")]
    lines += [f"  | {line}" for number in range(9) for line in frame(LIBRARY, number, "call()")]
    shown = stack_lines.of("\n".join(lines), 8)
    assert len(shown) <= 8
    assert '  |   File "/home/a/train.py", line 8, in f' in shown


PATHS = st.sampled_from([LIBRARY, "/home/a/train.py", "<string>"])
FRAMES = st.lists(
    st.builds(frame, PATHS, st.integers(1, 99), st.sampled_from(["a()", "b()"])),
    min_size=1,
    max_size=30,
)


@given(FRAMES, st.integers(2, 20))
def test_no_more_lines_than_there_is_room_for_and_the_end_is_among_them(
    frames: list[list[str]], most: int
) -> None:
    shown = stack_lines.of(traceback(*frames), most)
    assert len(shown) <= most
    if most > 2:
        assert shown[-2:] == frames[-1]
    total = sum(len(each) for each in frames)
    counts = [int(line.split()[1]) for line in shown if line.startswith("…")]
    assert len(shown) - len(counts) + sum(counts) == total


@given(st.text('| +\nFile"/, ^~Tracebck(moslp):-', max_size=400), st.integers(2, 20))
def test_any_text_is_survived(text: str, most: int) -> None:
    assert len(stack_lines.of(text, most)) <= most
