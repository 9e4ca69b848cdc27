"""Parsing the command line: what is a flag, what is its value, what belongs to the script."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line.flag_help import help_text
from rallypoint.launch.command_line.flags import FLAGS, Flag
from rallypoint.launch.command_line.given import find, parse, resolve


WITH_VALUE = [flag for flag in FLAGS if not flag.is_switch]
SWITCHES = [flag for flag in FLAGS if flag.is_switch]


def spellings(flag: Flag) -> list[str]:
    underscored = "--" + flag.name[2:].replace("-", "_")
    return [flag.name, underscored, *([flag.short] if flag.short else [])]


@st.composite
def flags_as_written(draw: st.DrawFn) -> tuple[dict[str, str], list[str]]:
    """Some flags with values, and one of the ways to write them."""
    values, words = {}, []
    for flag in draw(st.lists(st.sampled_from(FLAGS), unique_by=lambda flag: flag.name)):
        name = draw(st.sampled_from(spellings(flag)))
        if flag.is_switch:
            values[flag.name] = "1"
            words.append(name)
            continue
        value = values[flag.name] = draw(st.text(max_size=8))
        looks_like_a_flag = value.startswith("-") and len(value) > 1
        if looks_like_a_flag or draw(st.booleans()):
            words.append(f"{name}={value}")
        else:
            words += [name, value]
    return values, words


SCRIPTS = st.text(min_size=1, max_size=8).filter(
    lambda word: not word.startswith("-") or word == "-"
)
ARGUMENTS = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from([s for flag in FLAGS for s in spellings(flag)]))
)


@given(flags_as_written(), SCRIPTS, ARGUMENTS)
def test_nothing_of_the_script_is_lost_and_no_flag_of_ours(written, script, arguments):
    values, words = written
    taken = parse([*words, script, *arguments])
    assert taken.values == values
    assert taken.target == (script, *arguments)
    assert not taken.help


@given(flags_as_written(), ARGUMENTS)
def test_two_dashes_end_the_flags_whatever_follows(written, arguments):
    values, words = written
    taken = parse([*words, "--", *arguments])
    assert taken.values == values
    assert taken.target == tuple(arguments)


@given(st.lists(st.one_of(st.text(max_size=6), st.sampled_from([f.name for f in FLAGS]))))
def test_any_words_are_taken_apart_or_refused_by_name(words):
    """Only our exception is raised, and the target is always the rest of the line."""
    taken, refused = None, ""
    try:
        taken = parse(words)
    except ConfigError as error:
        refused = error.field
    if taken is None:
        assert refused.startswith("-")
    else:
        assert list(taken.target) == words[len(words) - len(taken.target) :]


@pytest.mark.parametrize(
    ("words", "values", "target"),
    [
        ("x.py --nproc-per-node 7 -- y", {}, "x.py --nproc-per-node 7 -- y"),
        ("--nproc_per_node=2 x.py", {"--nproc-per-node": "2"}, "x.py"),
        ("-r3 x.py", {"--redirects": "3"}, "x.py"),
        ("-r 0:3,11:1 x.py", {"--redirects": "0:3,11:1"}, "x.py"),
        ("-t=1 x.py", {"--tee": "1"}, "x.py"),
        ("-m pkg.mod -x", {"--module": "1"}, "pkg.mod -x"),
        ("-mr3 pkg.mod", {"--module": "1", "--redirects": "3"}, "pkg.mod"),
        ("-umt 3 pkg", {"--unbuffered": "1", "--module": "1", "--tee": "3"}, "pkg"),
        ("--max-restarts 1 --max-restarts 2 x.py", {"--max-restarts": "2"}, "x.py"),
        ("--master-port -5 x.py", {"--master-port": "-5"}, "x.py"),
        ("--log-dir - x.py", {"--log-dir": "-"}, "x.py"),
        ("--log-dir=--odd x.py", {"--log-dir": "--odd"}, "x.py"),
        ("--rdzv-conf a=1,b=2 x.py", {"--rdzv-conf": "a=1,b=2"}, "x.py"),
        ("-", {}, "-"),
        ("", {}, ""),
    ],
)
def test_taken_apart(words, values, target):
    taken = parse(words.split())
    assert taken.values == values
    assert taken.target == tuple(target.split())


def test_help_is_ours_only_before_the_script():
    assert parse(["--nproc-per-node", "2", "--help"]).help
    assert parse(["-h", "x.py"]).help
    assert not parse(["x.py", "--help"]).help


@pytest.mark.parametrize(
    ("words", "field", "text"),
    [
        ("--tee", "--tee", "expected a value (S)"),
        ("--log_dir --standalone x.py", "--log_dir", "found --standalone (write --log_dir=--stand"),
        ("--tee -x x.py", "--tee", "found -x"),
        ("--standalone=0 x.py", "--standalone", "takes no value"),
        ("-m=1 x.py", "-m", "takes no value"),
        ("-mx3 x.py", "-x", "no such flag"),
        ("--= x.py", "--", "no such flag"),
    ],
)
def test_what_cannot_be_is_named(words, field, text):
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    assert caught.value.field == field
    assert text in str(caught.value)


def test_a_value_with_a_space_may_begin_with_a_dash():
    assert parse(["--role", "-a b", "x.py"]).values == {"--role": "-a b"}


# -- names ----------------------------------------------------------------------------------------


@given(st.sampled_from(FLAGS), st.data())
def test_a_beginning_finds_its_flag_or_names_all_it_could_be(flag, data):
    length = data.draw(st.integers(3, len(flag.name)))
    beginning = data.draw(st.sampled_from(spellings(flag)[:2]))[:length]
    plain = beginning.replace("_", "-", 9)
    whole = next((other for other in FLAGS if other.name == plain), None)
    if whole is not None:
        assert find(beginning) is whole
        return
    # torchrun's go first: an abbreviation of one of those means the same here.
    matches = [other for other in FLAGS if other.name.startswith(plain)]
    could_be = {other.name for other in matches if not other.own} or {each.name for each in matches}
    if len(could_be) == 1:
        assert find(beginning).name in could_be
        return
    with pytest.raises(ConfigError) as caught:
        find(beginning)
    for name in could_be:
        assert name in str(caught.value)


def test_a_whole_name_is_found_though_another_begins_with_it():
    """As `--log` would be if there were such a flag; none is hidden today, and none may become so."""
    for flag in FLAGS:
        for spelling in spellings(flag):
            assert find(spelling) is flag


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("--nproc-per-nod2", "--nproc-per-node"),
        ("--nrpoc_per_node", "--nproc-per-node"),
        ("--nprocs-per-node", "--nproc-per-node"),
        ("--standalon3", "--standalone"),
        ("--max-restart-s", "--max-restarts"),
        ("--master-adr", "--master-addr"),
        ("--halp", "--help"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_flag(typo, meant):
    with pytest.raises(ConfigError, match=re.escape(f"did you mean {meant}?")):
        find(typo)


@pytest.mark.parametrize("name", ["--elastic", "-x", "--qqqqq"])
def test_nothing_is_suggested_where_nothing_is_near(name):
    with pytest.raises(ConfigError, match="rally run --help lists the flags"):
        find(name)


def test_names_are_unambiguous():
    written = [spelling for flag in FLAGS for spelling in {*spellings(flag)}]
    assert len(written) == len(set(written))


# -- precedence -----------------------------------------------------------------------------------


@given(st.sampled_from(WITH_VALUE), st.booleans(), st.booleans(), st.data())
def test_a_flag_beats_its_variable_and_that_the_default(flag, on_line, in_env, data):
    values = st.sampled_from(flag.choices) if flag.choices else st.text(max_size=5)
    line, env = data.draw(values), data.draw(values)
    taken = parse([*([f"{flag.name}={line}"] if on_line else []), "x.py"])
    found, origins = resolve(taken, {flag.variable: env} if in_env else {})
    if on_line:
        expected = line, "flag"
    elif in_env and flag.env:
        expected = env, flag.variable
    else:
        expected = flag.default, "default"
    assert (found[flag.dest], origins[flag.dest]) == expected


@pytest.mark.parametrize("flag", SWITCHES, ids=lambda flag: flag.name)
def test_a_switch_is_on_by_flag_or_by_a_number_but_zero(flag):
    assert resolve(parse(["x.py"]), {})[0][flag.dest] == "0"
    assert resolve(parse([flag.name, "x.py"]), {flag.variable: "0"})[0][flag.dest] == "1"
    if flag.env:
        assert resolve(parse(["x.py"]), {flag.variable: "1"})[0][flag.dest] == "1"
        for value in ("", "yes", "²", "+-1", "1.0"):
            with pytest.raises(ConfigError, match=flag.variable):
                resolve(parse(["x.py"]), {flag.variable: value})


def test_every_flag_has_a_value_and_an_origin():
    values, origins = resolve(parse(["x.py"]), {})
    assert set(values) == set(origins) == {flag.dest for flag in FLAGS}


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.choices], ids=lambda flag: flag.name)
def test_choices_are_listed_when_none_of_them_was_taken(flag):
    with pytest.raises(ConfigError) as caught:
        resolve(parse([flag.name, "other", "x.py"]), {})
    assert all(choice in str(caught.value) for choice in flag.choices)


# -- help -----------------------------------------------------------------------------------------


def test_help_shows_every_flag_with_its_default_in_a_hundred_columns():
    text = help_text()
    assert all(len(line) <= 100 for line in text.splitlines())
    for flag in FLAGS:
        assert re.search(rf"^  (-\w, )?{flag.name}( |$)", text, re.MULTILINE), flag.name
    assert "[SIGTERM,SIGINT,SIGHUP,SIGQUIT]" in text
    assert "-t, --tee S" in text
