"""A rendezvous backend and a launch cluster as third parties write them: with public names, found by entry points."""

import ast
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic import Cluster
from ports import free_port
from supervisors import run


HERE = Path(__file__).parent
BACKENDS, CLUSTERS = "rallypoint.rendezvous_backends", "rallypoint.clusters"

pytestmark = pytest.mark.integration

Install = Callable[[str, str, str], dict[str, str]]


@pytest.mark.parametrize("name", ["redislike", "skynet"])
def test_it_uses_public_names_only(name: str) -> None:
    tree = ast.parse((HERE / name / f"{name}.py").read_text())
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
    ours = [each for each in imports if (each.module or "").startswith("rallypoint")]
    assert ours
    for each in ours:
        assert each.module in {"rallypoint.errors", "rallypoint.launch", "rallypoint.rendezvous"}
        if each.module != "rallypoint.errors":
            public = importlib.import_module(each.module).__all__
            assert {one.name for one in each.names} <= set(public)


def rally(env: dict[str, str], *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "rallypoint", "run", *words]
    done = run(command, env={**os.environ, **env}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


# -- the backend ----------------------------------------------------------------------------------


def test_two_nodes_meet_at_its_endpoint_and_one_that_is_lost_is_replaced(
    installed: Install, server: Callable[[str], int], cluster: Cluster
) -> None:
    env = installed("redislike", BACKENDS, "redislike:REDISLIKE")
    endpoint = f"redislike://me:pa%40ss@127.0.0.1:{server('pa@ss')}?prefix=tests"
    line = ("--nnodes", "1:2", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")
    line += ("--shutdown-timeout", "2", "--insecure")
    conf = "lease=2,last_call_timeout=1,patience=5"
    for name in ("n0", "n1"):
        cluster.start(name, *line, "--rdzv-conf", conf, env=env)
    first = cluster.formed(2)
    cluster.goes_on(first)
    lost = cluster.node(first.workers[1]["node"])
    os.kill(lost.pid, 9)
    lost.killed = True
    second = cluster.formed(1, after=first.generation)
    cluster.goes_on(second)
    cluster.start("n2", *line, "--rdzv-conf", conf, env=env)
    third = cluster.formed(2, after=second.generation)
    cluster.goes_on(third)
    cluster.order("finish")
    left = [each for each in cluster.nodes if each is not lost]
    assert [each.wait() for each in left] == [0, 0], cluster
    cluster.check_history()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rdzv-endpoint", "redislik://a"), "did you mean redislike://?"),
        (("--rdzv-endpoint", "redis://a"), "did you mean redislike://?"),
        (("--rdzv-endpoint", "redislike://a:0"), "expected a port from 1 to 65535"),
        (
            ("--rdzv-endpoint", "redislike://a?prefx=x"),
            "has no option 'prefx' (known: patience, prefix) (did you mean prefix?)",
        ),
        (
            ("--rdzv-endpoint", "redislike://a", "--rdzv-conf", "patience=long"),
            "--rdzv-conf patience 'long': expected seconds: a number above 0",
        ),
        (("--rdzv-backend", "redislikee"), "did you mean redislike?"),
        (("--rdzv-backend", "rl"), "--rdzv-endpoint redislike://node0:6379"),
        (
            ("--rdzv-backend", "redislike", "--rdzv-endpoint", "tcp://a"),
            "tcp:// is for backend tcpstore or static, and the backend is redislike",
        ),
    ],
)
def test_its_mistakes_are_told_as_those_of_any_backend(
    installed: Install, words: tuple[str, ...], told: str
) -> None:
    env = installed("redislike", BACKENDS, "redislike:REDISLIKE")
    code, said = rally(env, "--nnodes", "2", "--insecure", *words, __file__)
    assert (code, told in said) == (2, True), said


def test_help_lists_it_with_its_options(installed: Install) -> None:
    code, said = rally(installed("redislike", BACKENDS, "redislike:REDISLIKE"), "--help")
    assert code == 0
    assert "--rdzv-backend redislike (also rl): a server that is like Redis" in said
    assert "--rdzv-endpoint redislike://node0:6379" in said
    assert "patience=                       seconds to wait for an answer [10]" in said


def test_torchrun_meets_there_too(installed: Install, server: Callable[[str], int]) -> None:
    env = installed("redislike", BACKENDS, "redislike:REDISLIKE")
    program = (
        "import json, sys; from types import SimpleNamespace;"
        "from rallypoint.rendezvous.torchrun import create_handler;"
        "params = SimpleNamespace(backend='rallypoint', endpoint=sys.argv[1], run_id='job', min_nodes=1,"
        " max_nodes=1, local_addr='127.0.0.1', config={'patience': '5'});"
        "handler = create_handler(params); info = handler.next_rendezvous();"
        "info.store.set('key', 'value');"
        "print(json.dumps([info.rank, info.world_size, info.store.get('key').decode()]));"
        "handler.shutdown()"
    )
    words = [sys.executable, "-c", program, f"redislike://127.0.0.1:{server('')}"]
    done = run(words, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 1, "value"]


# -- the cluster ----------------------------------------------------------------------------------


def test_supervisors_find_their_place_in_its_variables(
    installed: Install, cluster: Cluster
) -> None:
    env = installed("skynet", CLUSTERS, "skynet:SKYNET")
    env |= {"SKYNET_PODS": "2", "SKYNET_JOB": "t800", "SKYNET_PORT": str(free_port())}
    # A pod may also contain these by chance: an outer platform's variables decide nothing here.
    env |= {"MASTER_ADDR": "nowhere.invalid", "RANK": "5", "WORLD_SIZE": "6"}
    for rank in range(2):
        cluster.start(f"n{rank}", env={**env, "SKYNET_POD": str(rank)})
    formed = cluster.formed(2)
    assert formed.names == ["n0", "n1"]
    said = "Skynet job t800: node 1 of 2, master 127.0.0.1"
    assert cluster.node("n1").said(said)
    cluster.goes_on(formed)
    cluster.order("finish")
    assert [each.wait() for each in cluster.nodes] == [0, 0], cluster


def test_its_mistakes_are_told_and_a_broken_one_stops_the_job(installed: Install) -> None:
    env = installed("skynet", CLUSTERS, "skynet:SKYNET")
    code, said = rally({**env, "SKYNET_POD": "x"}, __file__)
    assert (code, "SKYNET_POD 'x': expected a whole number" in said) == (2, True), said
    code, said = rally({**env, "SKYNET_POD": "1"}, __file__)
    assert "SKYNET_PODS: not set, although SKYNET_POD is" in said
    env = installed("redislike", CLUSTERS, "redislike:REDISLIKE")
    code, said = rally(env, __file__)
    assert code == 1
    assert "cluster 'redislike' is Backend, not a Cluster" in said
    assert "distribution redislike 1.0" in said
