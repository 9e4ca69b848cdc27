"""Which packages the next workers have already imported when they start."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from hypothesis import given, strategies as st

from rallypoint._core import env as environment
from rallypoint.launch.server.learning import (
    LEARNABLE,
    MOST_REPORTS,
    Learned,
    Observation,
    Report,
    is_installed,
    objection,
    package_of,
    reports_in,
    unknown_library,
)
from rallypoint.launch.server.template import from_json, to_json
from rallypoint.launch.worker import import_watch


DYNAMO, FSDP = "torch._dynamo", "torch.distributed.fsdp"
VARIABLES = st.frozensets(st.sampled_from(["RANK", "HOME", "TORCH_LOGS", "HF_HOME"]))
OBSERVATIONS = st.builds(
    Observation,
    error=st.sampled_from(["", "ValueError: no"]),
    reads=VARIABLES,
    reads_all=st.booleans(),
    sets=VARIABLES,
    foreign=st.sampled_from([(), ("mine",)]),
    hidden=st.sampled_from([(), ("sympy",)]),
    native=st.sampled_from([(), ("tokenizers",)]),
    left=st.sampled_from([(), ("starts a thread",), ("prints", "starts a process")]),
)
PACKAGES = st.sampled_from(LEARNABLE)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("torch._dynamo", DYNAMO),
        ("torch._dynamo.config", DYNAMO),
        ("torch._dynamo_of_another_name", None),
        ("torch", None),
        ("torch.nn", None),
        ("transformers", None),
        ("mine.torch._dynamo", None),
        ("rallypoint.elastic", "rallypoint.elastic"),
        ("rallypoint.elastic.session", "rallypoint.elastic"),
        ("rallypoint.testing", None),
    ],
)
def test_only_parts_of_torch_and_of_this_package_are_learned(
    module: str, package: str | None
) -> None:
    assert package_of(module) == package
    wanted = Learned().reported(module, []).wanted()
    assert wanted == (() if package is None else (package,))


REPORT = Report(DYNAMO, ("RANK", "HOME"), ("/mine",))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([DYNAMO, "os", "HOME"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["package", "changed", "paths"]), inner, max_size=3)
    ),
    max_leaves=20,
)


def test_what_other_nodes_have_learned_comes_back() -> None:
    assert reports_in([REPORT.to_json(), 3, {}]) == [REPORT]
    assert len(reports_in([REPORT.to_json()] * 2 * MOST_REPORTS)) == MOST_REPORTS


@given(st.lists(JSON) | JSON)
def test_what_another_node_tells_leads_to_no_other_import(told: object) -> None:
    for each in reports_in(told):
        assert package_of(each.package) is not None
        assert all(isinstance(text, str) for text in (*each.changed, *each.paths))


@pytest.mark.parametrize("package", ["os", "antigravity", "mine.torch._dynamo", ""])
def test_any_other_package_is_left_out(package: str) -> None:
    assert reports_in([{**REPORT.to_json(), "package": package}]) == []


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (Observation(error="ValueError: why"), "why"),
        (Observation(foreign=("mine",)), "mine"),
        (Observation(native=("tokenizers",)), "tokenizers"),
        (Observation(hidden=("sympy",)), "sympy"),
        (Observation(left=("starts a thread",)), "starts a thread"),
        (Observation(reads_all=True), "whole environment"),
        (Observation(reads=frozenset({"HF_HOME", "HOME"})), "HF_HOME"),
    ],
)
def test_an_import_that_a_script_could_notice_is_not_kept(seen: Observation, word: str) -> None:
    learned = Learned().reported(DYNAMO, ["RANK", "HF_HOME"]).observed(DYNAMO, seen)
    assert word in learned.objections()[DYNAMO]
    assert learned.wanted() == ()


def test_a_late_report_of_another_worker_counts() -> None:
    seen = Observation(reads=frozenset({"HF_HOME"}))
    learned = Learned().reported(DYNAMO, ["RANK"]).observed(DYNAMO, seen)
    assert learned.wanted() == (DYNAMO,)
    assert learned.reported(DYNAMO, ["HF_HOME"]).wanted() == ()


def test_what_an_earlier_import_sets_does_not_count_as_changed_by_the_script() -> None:
    first = Observation(sets=frozenset({"CACHE"}))
    second = Observation(reads=frozenset({"CACHE"}))
    learned = Learned().reported(DYNAMO, ["RANK"]).reported(FSDP, ["RANK", "CACHE"])
    learned = learned.observed(DYNAMO, first).observed(FSDP, second)
    assert learned.wanted() == (DYNAMO, FSDP)
    assert learned.broke(DYNAMO, "crashed").wanted() == ()  # nothing else has set it


def test_a_package_at_which_a_template_crashed_is_not_tried_again() -> None:
    learned = Learned().reported(DYNAMO, []).reported(FSDP, []).broke(DYNAMO, "crashed")
    assert learned.wanted() == (FSDP,)
    assert learned.reported(DYNAMO, []).wanted() == (FSDP,)


@given(OBSERVATIONS, VARIABLES, VARIABLES)
def test_more_differences_never_make_an_import_acceptable(
    seen: Observation, changed: frozenset[str], more: frozenset[str]
) -> None:
    if objection(seen, changed):
        assert objection(seen, changed | more)


@given(OBSERVATIONS, VARIABLES)
def test_what_is_kept_is_harmless(seen: Observation, changed: frozenset[str]) -> None:
    if not objection(seen, changed):
        assert not (seen.error or seen.foreign or seen.hidden or seen.native)
        assert not (seen.left or seen.reads_all)
        assert not seen.reads & changed


@given(
    st.lists(st.tuples(PACKAGES, VARIABLES)),
    st.dictionaries(PACKAGES, OBSERVATIONS),
    st.sets(PACKAGES),
)
def test_wanted_are_reported_packages_without_objection(
    reports: list[tuple[str, frozenset[str]]],
    seen: Mapping[str, Observation],
    broken: set[str],
) -> None:
    learned = Learned()
    for package, changed in reports:
        learned = learned.reported(package, changed)
    for package, each in seen.items():
        learned = learned.observed(package, each)
    for package in broken:
        learned = learned.broke(package, "crashed")
    wanted = learned.wanted()
    order = list(dict.fromkeys(package for package, _ in reports))
    assert [package for package in order if package in wanted] == list(wanted)
    assert not broken & set(wanted)
    for package in wanted:
        if package in seen:
            assert not seen[package].left
            assert not seen[package].error


@given(OBSERVATIONS)
def test_an_observation_survives_its_way_to_the_fork_server(seen: Observation) -> None:
    assert from_json(to_json(seen)) == seen


def test_files_and_libraries_are_told_apart() -> None:
    sites, system = ["/v/lib/site-packages"], ["/v/lib", "/usr/lib"]
    assert is_installed("/v/lib/site-packages/a/b.py", sites)
    assert not is_installed("/v/lib/site-packages-of-mine/a.py", sites)
    assert not is_installed("/home/me/train.py", sites)
    assert unknown_library("/v/lib/site-packages/numpy/x.so", sites, system) == ""
    assert unknown_library("/v/lib/site-packages/odd/x.so", sites, system) == "odd"
    assert unknown_library("/v/lib/lib-dynload/_decimal.so", sites, system) == ""
    assert unknown_library("/opt/vendor/x.so", sites, system) == "/opt/vendor/x.so"


def test_reads_of_the_environment_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRESENT", "1")
    kind = type(os.environ)
    with environment.watched() as reads:
        os.environ.get("ABSENT")
        os.getenv("GETENV")
        assert os.environ["PRESENT"] == "1"
        assert "CONTAINED" not in os.environ
        os.environ["WRITTEN"] = "x"
    assert type(os.environ) is kind
    assert reads.names >= {"ABSENT", "GETENV", "PRESENT", "CONTAINED"}
    assert not reads.everything
    assert reads.changes() == {"WRITTEN": "x"}
    environment.apply({"WRITTEN": None})
    assert reads.changes() == {}


@pytest.mark.parametrize(
    "use",
    [
        *(dict, list, len, lambda env: env.copy(), lambda env: {**env}),
        lambda env: [value for name, value in env.items() if name.startswith("TQDM_")],
        lambda env: list(env.values()),
        lambda env: next(iter(env.items())),
    ],
)
def test_listing_the_environment_is_noted_and_reads_no_variable_by_name(
    use: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRESENT", "1")
    with environment.watched() as reads:
        use(os.environ)  # type: ignore[operator]
        assert reads.everything and reads.names == set()
        assert os.environ["PRESENT"] == "1"
    assert reads.names == {"PRESENT"}


@pytest.mark.parametrize(
    ("now", "added"),
    [
        (["/job", "/lib", "/site"], []),
        (["/mine", "/job", "/lib", "/site"], ["/mine"]),
        (["/job", "/lib", "/mine", "/site"], ["/mine"]),
        (["/job", "/lib", "/site", "/mine"], []),
        (["/job", "/site"], []),
        (["/mine"], ["/mine"]),
        ([], []),
    ],
)
def test_folders_put_first_on_the_path(now: list[str], added: list[str]) -> None:
    assert import_watch.ahead(now, ["/job", "/lib", "/site"]) == added
