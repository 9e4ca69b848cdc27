"""Which warm server fits a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rallypoint.launch.server import warm_key


FACTS = warm_key.Facts(
    install=["/usr/bin/python3", "/usr"],
    versions=["3.11", "2.13"],
    flags=[],
    env={"OMP_NUM_THREADS": "1", "HOME": "/home/ada", "MINE": "1", "PATH": "/usr/bin"},
    folder="/home/ada/project",
    state={"nice": "0"},
)


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"env": {**FACTS.env, "MINE": "2"}}, True),
        ({"env": {**FACTS.env, "WANDB_API_KEY": "secret"}}, True),
        ({"env": {**FACTS.env, "PATH": "/opt/bin"}}, True),
        ({"folder": "/elsewhere"}, True),
        ({"env": {**FACTS.env, "OMP_NUM_THREADS": "2"}}, False),
        ({"env": {**FACTS.env, "TORCH_LOGS": "dynamo"}}, False),
        ({"env": {**FACTS.env, "LD_PRELOAD": "/lib/x.so"}}, False),
        ({"env": {**FACTS.env, "PYTHONPATH": "/opt/lib"}}, False),
        ({"env": {**FACTS.env, "HOME": "/root"}}, False),
        ({"flags": ["-O"]}, False),
        ({"versions": ["3.11", "2.14"]}, False),
        ({"install": ["/opt/bin/python3", "/opt"]}, False),
        ({"state": {"nice": "5"}}, False),
    ],
)
def test_what_makes_another_server(change: dict[str, object], is_same: bool) -> None:
    other = replace(FACTS, **change)  # type: ignore[arg-type]
    assert (warm_key.name(other) == warm_key.name(FACTS)) == is_same


@pytest.mark.parametrize(
    ("path", "depends"),
    [("", False), ("/a:/b", False), ("src", True), ("/a:", True), ("/a:lib:/b", True)],
)
def test_a_relative_module_path_belongs_to_one_folder(path: str, depends: bool) -> None:
    env = {"PYTHONPATH": path} if path else {}
    assert warm_key.depends_on_folder(env) is depends
    here, there = (
        warm_key.name(replace(FACTS, env=env, folder=folder)) for folder in ("/here", "/there")
    )
    assert (here != there) is depends


def test_a_server_gets_no_secrets() -> None:
    env = {
        "HOME": "/home/ada",
        "OMP_NUM_THREADS": "1",
        "RALLY_SECRET": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "WANDB_API_KEY": "s",
        "TORCH_HUB_TOKEN": "s",
    }
    assert set(warm_key.variables(env)) == {"HOME", "OMP_NUM_THREADS"}


def test_only_servers_of_the_same_installation_are_outdated() -> None:
    name = warm_key.name(FACTS)
    newer = warm_key.name(replace(FACTS, versions=["3.11", "2.14"]))
    elsewhere = warm_key.name(replace(FACTS, install=["/opt"], versions=["3.12"]))
    other_env = warm_key.name(replace(FACTS, env={}))
    assert warm_key.is_outdated(name, newer)
    assert not warm_key.is_outdated(elsewhere, newer)
    assert not warm_key.is_outdated(other_env, name)


def test_variables_that_imports_read_must_be_equal() -> None:
    then = {"A": "1", "B": "1"}
    assert warm_key.why_other({"A"}, then, {"A": "1", "B": "2"}) == ""
    assert "reads B" in warm_key.why_other({"A", "B"}, then, {"A": "1", "B": "2"})
    assert "reads C" in warm_key.why_other({"C"}, then, {"C": ""})


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["train.py", "data"], ""),
        (["train.py", "numpy.py"], "numpy.py"),
        (["numpy"], "numpy"),
        (["numpy.cpython-311-x86_64-linux-gnu.so"], "numpy.cpython-311-x86_64-linux-gnu.so"),
        (["numpy.txt", "numpy.md"], ""),
    ],
)
def test_files_that_shadow_loaded_modules(names: list[str], found: str) -> None:
    assert warm_key.shadowed(names, {"numpy", "torch"}) == found


def test_inherited_lines() -> None:
    status = "Name:\tpython\nUid:\t0\t0\t0\t0\nVmRSS:\t 5 kB\nCpus_allowed_list:\t0-1\n"
    assert warm_key.inherited(status) == {"Uid": "0\t0\t0\t0", "Cpus_allowed_list": "0-1"}
