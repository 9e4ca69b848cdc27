"""From flags and environment to a config, without anything being started."""

from __future__ import annotations

import os
import re
import signal
import sys
import uuid
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.command_line import settings
from rallypoint.launch.command_line.given import parse
from rallypoint.launch.command_line.settings import config_from
from rallypoint.launch.config import LaunchConfig, StartMethod, StreamChoice, Streams, TargetKind


@pytest.fixture(autouse=True)
def in_a_folder_with_a_script(tmp_path, monkeypatch):
    (tmp_path / "x.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "_may_have_accelerators", lambda: False)


def configure(line: str, /, **env: str) -> tuple[LaunchConfig, list[str]]:
    made, remarks = configure_aloud(line, **env)
    return made, [each for each in remarks if not each.startswith("no secret")]


def configure_aloud(line: str, /, **env: str) -> tuple[LaunchConfig, list[str]]:
    return config_from(parse(line.split()), {"PATH": os.environ["PATH"], **env})


def config(line: str, /, **env: str) -> LaunchConfig:
    return configure(line, **env)[0]


def refusal(line: str, /, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        configure(line, **env)
    return str(caught.value)


# -- streams --------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.integers(0, 200), st.sampled_from(Streams), min_size=1), st.integers(0, 200)
)
def test_streams_by_rank_are_those_of_the_rank_and_none_for_others(choice, other):
    text = ",".join(f"{rank}:{int(streams)}" for rank, streams in choice.items())
    parsed = StreamChoice.parse(text, "--tee")
    for rank, streams in choice.items():
        assert parsed.of(rank) == streams
    assert parsed.of(other) == choice.get(other, Streams.NONE)
    assert parsed.any() == any(choice.values())


@pytest.mark.parametrize("number", range(4))
def test_one_number_is_for_every_rank(number):
    parsed = StreamChoice.parse(str(number), "--tee")
    assert {int(parsed.of(rank)) for rank in (0, 9, 10, 127)} == {number}
    assert parsed.any() == (number > 0)


@given(st.text("0123456789:,-+_ ²x", max_size=8))
def test_any_other_text_is_refused_by_the_flag_s_name(text):
    plain = re.fullmatch(r"[0-3]|\s*\d+:[0-3]\s*(,\s*\d+:[0-3]\s*)*", text, re.ASCII)
    ranks = [int(each) for each in re.findall(r"(\d+):", text, re.ASCII)] if plain else []
    if plain and len(set(ranks)) == len(ranks):
        StreamChoice.parse(text, "--tee")
    else:
        with pytest.raises(ConfigError, match=r"^--tee .*0:3,11:1"):
            StreamChoice.parse(text, "--tee")


# -- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "nodes", "workers"),
    [
        ("x.py", 1, 1),
        ("--nproc-per-node 3 x.py", 1, 3),
        ("--nproc-per-node +3 x.py", 1, 3),
        ("--nproc-per-node cpu x.py", 1, len(os.sched_getaffinity(0))),
        ("--nproc-per-node auto x.py", 1, len(os.sched_getaffinity(0))),
        ("--nnodes 1:1 x.py", 1, 1),
        ("--nnodes 4:4 --nproc-per-node 2 x.py", 4, 2),
        ("--standalone --nnodes 4 x.py", 1, 1),
        ("--standalone --nnodes 1:4 x.py", 1, 1),
    ],
)
def test_size(line, nodes, workers):
    made = config(line)
    assert (made.num_nodes, made.workers_per_node) == (nodes, workers)


@pytest.mark.parametrize(("word", "kind"), [("auto", None), ("gpu", "cuda"), ("xpu", "xpu")])
def test_accelerators_are_counted_later_where_there_may_be_some(monkeypatch, word, kind):
    monkeypatch.setattr(settings, "_may_have_accelerators", lambda: True)
    made = config(f"--nproc-per-node {word} x.py")
    assert (made.workers_per_node, made.accelerator) == (None, kind)


def test_gpus_are_refused_at_once_where_there_are_none():
    assert "no such device" in refusal("--nproc-per-node gpu x.py")


# -- nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "addr", "port"),
    [
        ("x.py", None, None),
        ("--master-addr node0 x.py", None, None),
        ("--master-port 1234 x.py", "127.0.0.1", 1234),
        ("--master-addr node0 --master-port 1234 x.py", "node0", 1234),
        ("--rdzv-endpoint node0:1234 x.py", "node0", 1234),
        ("--rdzv-endpoint [::1]:1234 x.py", "::1", 1234),
        ("--rdzv-endpoint node0 x.py", "node0", 29500),
        ("--rdzv-backend c10d --rdzv-endpoint node0:1234 x.py", None, None),
        ("--rdzv-backend c10d --master-port 1234 x.py", None, None),
        ("--standalone --master-port 1234 x.py", None, None),
        ("--standalone --rdzv-endpoint node0:1234 x.py", None, None),
        ("--standalone --rdzv-backend etcd x.py", None, None),
    ],
)
def test_where_workers_of_one_node_meet(line, addr, port):
    made = config(line)
    assert (made.num_nodes, made.master_addr, made.master_port) == (1, addr, port)


@pytest.mark.parametrize(
    ("line", "rank", "host", "port"),
    [
        ("--nnodes 2 x.py", 0, "127.0.0.1", 29500),
        ("--nnodes 2 --node-rank 1 --master-addr node0 x.py", 1, "node0", 29500),
        ("--nnodes 2 --node_rank=1 --master_addr=n --master_port=7 x.py", 1, "n", 7),
        # The same line on every node: ranks are assigned. Otherwise, whatever differs between nodes gives the rank.
        ("--nnodes 2 --rdzv-endpoint n:8 x.py", None, "n", 8),
        ("--nnodes 2:2 --rdzv-endpoint n x.py", None, "n", 29400),
        ("--nnodes 2 --rdzv-endpoint tcp://n x.py", None, "n", 29400),
        ("--nnodes 2 --rdzv-endpoint [fe80::1] x.py", None, "fe80::1", 29400),
        ("--nnodes 2 --rdzv-endpoint n:8 --node-rank 0 x.py", 0, "n", 8),
        ("--nnodes 2 --rdzv-endpoint n --node-rank 1 x.py", 1, "n", 29400),
        ("--nnodes 2 --rdzv-endpoint tcp://n --node-rank 1 x.py", 1, "n", 29400),
        ("--nnodes 2 --rdzv-endpoint n:8 --master-addr n x.py", 0, "n", 8),
        ("--nnodes 2 --rdzv-endpoint n:8 --rdzv-backend static x.py", 0, "n", 8),
        ("--nnodes 2:4 --rdzv-endpoint n:8 --node-rank 1 x.py", None, "n", 8),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint n x.py", None, "n", 29400),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint n:9 --node-rank 1 x.py", None, "n", 9),
    ],
)
def test_where_several_nodes_meet(line, rank, host, port):
    rendezvous = config(line).rendezvous
    assert (rendezvous.node_rank, rendezvous.host, rendezvous.port) == (rank, host, port)


@pytest.mark.parametrize(
    ("line", "run_id"),
    [
        ("x.py", None),
        ("--standalone --rdzv-id job x.py", None),
        ("--rdzv-id job x.py", "job"),
        ("--master-port 1234 x.py", "none"),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0 x.py", "none"),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id 7 x.py", "7"),
        ("--nnodes 2 x.py", "none"),
    ],
)
def test_a_job_without_a_name_gets_one_where_torchrun_gives_one(line, run_id):
    made = config(line).rendezvous.run_id
    if run_id is None:
        assert str(uuid.UUID(made)) == made
        assert config(line).rendezvous.run_id != made
    else:
        assert made == run_id


@pytest.mark.parametrize(
    ("conf", "join", "lease", "without_effect"),
    [
        ("", 600, 5, None),
        ("join_timeout=5", 5, 5, None),
        ("timeout=7.5,heartbeat_timeout=3", 7.5, 3, None),
        ("lease=2.5", 600, 2.5, None),
        (" join_timeout=5 , read_timeout=60,use_libuv=1", 5, 5, "read_timeout, use_libuv"),
    ],
)
def test_settings_of_the_rendezvous(conf, join, lease, without_effect):
    taken = parse(["--nnodes", "2", "--node-rank", "0", "--rdzv-conf", conf, "x.py"])
    made, remarks = config_from(taken, {"RALLY_SECRET": "nothing to warn of"})
    assert made.rendezvous.join_timeout == join
    assert made.rendezvous.lease == lease
    assert [r for r in remarks if without_effect and without_effect in r] == remarks


def test_more_settings_of_the_rendezvous():
    conf = "last_call_timeout=3,is_host=true,label=rack-7,split_brain_guard=no"
    made = config(f"--nnodes 2:4 --rdzv-endpoint n --rdzv-conf {conf} x.py").rendezvous
    assert (made.last_call, made.is_host, made.label) == (3, True, "rack-7")
    assert not made.split_brain_guard


def test_a_backend_takes_its_own_options_and_a_misspelt_one_is_told_of():
    line = "--nnodes 2 --rdzv-endpoint etcd://a --rdzv-conf"
    made = config(f"{line} ttl=90,ca_cert=/ca,lease=2 x.py").rendezvous
    assert (made.options, made.lease) == ({"ttl": "90", "ca_cert": "/ca"}, 2)
    assert "--rdzv-conf ttl 'soon': expected a whole number" in refusal(f"{line} ttl=soon x.py")
    (remark,) = configure(f"{line} prefx=mine x.py")[1]
    assert "prefx has no effect (known: join_timeout," in remark
    assert remark.endswith("password, prefix, protocol, ttl); did you mean prefix?")


def test_a_store_of_one_process_is_none_for_several_nodes():
    for line in ("--rdzv-endpoint memory://x", "--rdzv-backend memory --rdzv-endpoint x"):
        assert "for threads of one process" in refusal(f"--nnodes 2 {line} x.py")


@pytest.mark.parametrize(
    ("line", "least", "most", "backend"),
    [
        ("--nnodes 2:4 --rdzv-endpoint n x.py", 2, 4, "tcpstore"),
        ("--nnodes 2:4 --rdzv-endpoint tcp://a,b:1,c x.py", 2, 4, "tcpstore"),
        ("--nnodes 3 --rdzv-backend c10d --rdzv-endpoint n x.py", 3, 3, "tcpstore"),
        ("--nnodes 3 --rdzv-backend rallypoint --rdzv-endpoint n x.py", 3, 3, "tcpstore"),
        ("--nnodes 1:8 --rdzv-endpoint etcd://a:2379,b x.py", 1, 8, "etcd"),
        ("--nnodes 1:8 --rdzv-backend etcd-v2 --rdzv-endpoint a x.py", 1, 8, "etcd"),
        ("--nnodes 2 --rdzv-endpoint file:///shared/x x.py", 2, 2, "file"),
    ],
)
def test_nodes_that_come_and_go(line, least, most, backend):
    made = config(line)
    assert (made.min_nodes, made.num_nodes, made.elastic) == (least, most, True)
    assert made.rendezvous.endpoint.backend == backend
    assert made.master_addr is None, "any node may be node 0: it tells its own address"


def test_the_secret_is_read_from_a_file_or_the_variable(tmp_path):
    file = tmp_path / "secret"
    file.write_text("from a file, long\n")
    file.chmod(0o600)
    line = "--nnodes 2:4 --rdzv-endpoint n"
    assert config(f"{line} x.py").secret is None
    assert config(f"{line} x.py", RALLY_SECRET="of the environment").secret == b"of the environment"
    assert config(f"{line} x.py", RALLY_SECRET_FILE=str(file)).secret == b"from a file, long"
    made = config(f"{line} --secret-file {file} x.py", RALLY_SECRET="of the environment")
    assert made.secret == b"from a file, long"
    assert "from a file" not in repr(made)
    file.chmod(0o644)
    assert "chmod 600" in refusal(f"{line} --secret-file {file} x.py")


def test_one_node_makes_a_secret_of_its_own():
    one, other = config("x.py"), config("--insecure x.py")
    assert len(one.secret) == len(other.secret) == 32
    assert one.secret != other.secret
    assert config("x.py", RALLY_SECRET="of the environment").secret == b"of the environment"
    assert "RALLY_SECRET" in refusal("x.py", RALLY_SECRET="short")


def test_several_nodes_without_a_secret_are_warned_of_unless_they_say_insecure(tmp_path):
    line = "--nnodes 2 --rdzv-endpoint n"
    home = {"HOME": str(tmp_path)}
    _, remarks = configure_aloud(f"{line} x.py", **home)
    (warning,) = [each for each in remarks if each.startswith("no secret")]
    assert "rally secret" in warning
    assert "--insecure" in warning
    made, remarks = configure_aloud(
        f"{line} --insecure x.py", RALLY_SECRET="of the environment", **home
    )
    assert (made.secret, remarks) == (None, [])


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_the_tasks_of_a_cluster_the_first_one_warns(tmp_path, rank):
    env = {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NODEID": rank, "SLURM_LOCALID": "0"}
    env |= {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "HOME": str(tmp_path),
    }
    _, remarks = configure_aloud("x.py", **env)
    assert any(each.startswith("no secret") for each in remarks) == (rank == "0")
    assert any(each.startswith("Slurm job 7") for each in remarks)


def test_the_users_own_file_is_used_where_several_nodes_meet(tmp_path):
    from rallypoint.launch.command_line import secret_file

    home = {"HOME": str(tmp_path)}
    told = secret_file.command([], home)
    path = tmp_path / ".config/rallypoint/secret"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert str(path) in told
    assert path.read_text().strip() not in told
    made, remarks = configure_aloud("--nnodes 2 --rdzv-endpoint n x.py", **home)
    assert made.secret == path.read_bytes().strip()
    assert remarks == []
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "SLURM_NNODES": "2"}
    slurm |= {"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
    slurm |= {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
    }
    slurm |= {"SLURM_STEP_NUM_TASKS": "2"}
    assert config("x.py", **home, **slurm).secret == made.secret
    with pytest.raises(ConfigError, match="--force"):
        secret_file.command([], home)
    secret_file.command(["--force"], home)
    assert path.read_bytes().strip() != made.secret
    path.chmod(0o644)
    assert "chmod 600" in refusal("--nnodes 2 --rdzv-endpoint n x.py", **home)
    assert config("x.py", **home).secret, "one node does not need it"


def test_a_home_folder_that_cannot_be_written_is_named():
    from rallypoint.launch.command_line import secret_file

    with pytest.raises(ConfigError, match=r"secret '/dev/null/.config/rallypoint': .*give a FILE"):
        secret_file.command([], {"HOME": "/dev/null"})


def test_a_flag_about_nodes_silences_the_cluster():
    slurm = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}
    found, remarks = configure("x.py", **slurm)
    assert (found.num_nodes, found.rendezvous.node_rank) == (4, 1)
    assert len(remarks) == 1
    for flag in ("--standalone", "--nnodes 1", "--node-rank 0", "--master-addr localhost"):
        made, remarks = configure(f"{flag} x.py", **slurm)
        assert (made.num_nodes, remarks) == (1, [])


SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}


def test_a_range_of_nodes_leaves_the_place_to_the_cluster():
    made, remarks = configure("--nnodes 2:4 x.py", **SLURM_STEP)
    assert (made.min_nodes, made.num_nodes) == (2, 3), "a fourth cannot come"
    meeting = made.rendezvous
    assert (meeting.node_rank, meeting.host, meeting.port) == (None, "n1", 15007)
    assert meeting.run_id == "7.0"
    assert "Slurm job 7: node 2 of 3" in remarks[0]
    assert config("--nnodes 2:4 x.py", **SLURM_STEP, MASTER_ADDR="ib1").rendezvous.host == "ib1"
    requeued = config("--nnodes 2:4 x.py", **SLURM_STEP, SLURM_RESTART_COUNT="2")
    assert requeued.rendezvous.run_id == "7.0-2"
    # An explicit endpoint takes precedence.
    given = config("--nnodes 2:4 --rdzv-endpoint other:1 --rdzv-id j x.py", **SLURM_STEP)
    assert (given.num_nodes, given.rendezvous.host, given.rendezvous.run_id) == (4, "other", "j")


@pytest.mark.parametrize(
    "env",
    [
        {"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "n1", "WORLD_SIZE": "3"},
        {"RANK": "2", "MASTER_ADDR": "n1", "WORLD_SIZE": "3"},
        {"VC_TASK_INDEX": "2", "VC_WORKER_HOSTS": "n1,n2,n3", "VC_WORKER_NUM": "3"},
        {"SKYPILOT_NODE_RANK": "2", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_IPS": "n1\nn2\nn3"},
        {
            "OMPI_COMM_WORLD_RANK": "2",
            "OMPI_COMM_WORLD_SIZE": "3",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "MASTER_ADDR": "n1",
        },
    ],
)
def test_a_range_of_nodes_below_other_engines(env: dict[str, str]):
    made = config("--nnodes 2:4 x.py", **env)
    assert (made.min_nodes, made.num_nodes) == (2, 3)
    assert (made.rendezvous.node_rank, made.rendezvous.host) == (None, "n1")


def test_a_range_that_the_tasks_of_a_cluster_cannot_meet():
    assert "Slurm job 7 has started 3 tasks" in refusal("--nnodes 4:8 x.py", **SLURM_STEP)
    two_here = SLURM_STEP | {
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_NODEID": "1",
    }
    assert "one task per machine" in refusal("--nnodes 2:3 x.py", **two_here)


# -- the target -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind", "name", "args"),
    [
        ("x.py a --b", TargetKind.SCRIPT, "x.py", ("a", "--b")),
        (". a", TargetKind.SCRIPT, ".", ("a",)),
        ("-m pkg.mod -- a", TargetKind.MODULE, "pkg.mod", ("--", "a")),
        ("--no-python sh -c true", TargetKind.PROGRAM, "sh", ("-c", "true")),
    ],
)
def test_target(line, kind, name, args):
    Path("__main__.py").touch()
    target = config(line).job
    assert (target.kind, target.name, target.args) == (kind, name, args)


@pytest.mark.parametrize(
    ("line", "python_exec", "method"),
    [
        ("x.py", None, StartMethod.FORKSERVER),
        ("--start-method exec x.py", None, StartMethod.EXEC),
        ("--start-method spawn x.py", None, StartMethod.EXEC),
        ("--start-method fork x.py", None, StartMethod.FORKSERVER),
        ("--no-python sh", None, StartMethod.EXEC),
        ("x.py", sys.executable, StartMethod.FORKSERVER),
        ("x.py", "/bin/sh", StartMethod.EXEC),
    ],
)
def test_start_method(line, python_exec, method):
    made = config(line, **({"PYTHON_EXEC": python_exec} if python_exec else {}))
    assert made.start_method is method
    assert made.job.python == (python_exec if python_exec == "/bin/sh" else None)


# -- the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("SIGTERM", (signal.SIGTERM,)),
        ("term, usr1,SIGUSR1", (signal.SIGTERM, signal.SIGUSR1)),
        ("", ()),
    ],
)
def test_signals(text, numbers):
    """Ctrl-C and a closed terminal end a job, whatever signals are named."""
    taken = config_from(parse(["--signals-to-handle", text, "x.py"]), {})[0]
    assert taken.signals == numbers
    assert taken.ending_signals == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *numbers}


def test_a_signal_to_pass_ends_nothing():
    taken = config_from(parse(["--signals-to-pass", "INT", "x.py"]), {})[0]
    assert signal.SIGINT not in taken.ending_signals
    assert taken.passed_signals == (signal.SIGINT,)


@pytest.mark.parametrize(
    ("line", "env", "seconds"),
    [
        ("x.py", {}, 30),
        ("x.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4"}, 4),
        ("x.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4", "PET_SHUTDOWN_TIMEOUT": "5"}, 5),
        ("--shutdown-timeout 0 x.py", {"PET_SHUTDOWN_TIMEOUT": "5"}, 0),
        ("--shutdown-timeout 2.5 x.py", {}, 2.5),
    ],
)
def test_shutdown_timeout(line, env, seconds):
    assert config(line, **env).shutdown_timeout == seconds


@pytest.mark.parametrize(
    ("text", "words"),
    [("", ()), ("a,b", ("a", "b")), ("a,,b,c", ("a,b", "c")), (",a,", ("a",)), (",,", (",",))],
)
def test_words_of_filters(text, words):
    taken = parse(["--duplicate-stderr-filters", text, "x.py"])
    assert config_from(taken, {})[0].logs.stderr_filters == words


def test_an_empty_log_folder_is_none():
    assert config("--log-dir= x.py").logs.folder is None
    assert config("x.py", PET_LOG_DIR="").logs.folder is None


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        ("--monitor-interval 5 x.py", "--monitor-interval has no effect"),
        ("--event-log-handler console x.py", "--event-log-handler has no effect"),
        ("--logs-specs mine x.py", "--logs-specs has no effect"),
        ("--run-path x.py", "--run-path has no effect"),
        ("--start-method spawn x.py", "scripts are started with exec here"),
        ("--start-method exec --preload numpy x.py", "--preload has no effect"),
        ("--nnodes 2 x.py", "--node-rank is not given: this is node 0"),
        ("--node-rank 3 x.py", "--node-rank 3 has no effect: the job has one node"),
        ("--rdzv-endpoint= x.py", "--rdzv-endpoint is empty: is a variable of the shell not set?"),
        ("--rdzv-id= x.py", "--rdzv-id is empty"),
        ("--master-addr= x.py", "--master-addr is empty"),
        ("--local-addr= x.py", "--local-addr is empty"),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint= x.py", "--rdzv-endpoint is empty"),
        (
            "--local-ranks-filter 5 x.py",
            "there is no local rank 5 on this machine, only 0; so the console shows no output",
        ),
        (
            "--nproc-per-node 2 --local-ranks-filter 0,2 x.py",
            "--local-ranks-filter 0,2: there is no local rank 2 on this machine, only 0 to 1",
        ),
        ("--tee 0:3,4:1 x.py", "--tee 0:3,4:1: there is no local rank 4"),
        ("--redirects 4:1 x.py", "--redirects 4:1: there is no local rank 4"),
        ("--rdzv-conf timeout=3,timeout=4 x.py", "--rdzv-conf names timeout more than once"),
        ("--stacks-on-hang --hang-after 0 x.py", "--stacks-on-hang has no effect with"),
    ],
)
def test_what_has_no_effect_is_said_once(line, remark):
    _, remarks = configure(line)
    assert [remark in text for text in remarks] == [True]


@pytest.mark.parametrize(
    "line",
    [
        "x.py",
        "--monitor-interval 0.1 --event-log-handler null --nnodes 1 x.py",
        "--node-rank 0 x.py",
        "--standalone --node-rank 3 x.py",
        "--nproc-per-node 2 --local-ranks-filter 1 --tee 0:3,1:1 x.py",
        "--log-max-size 1K x.py",
    ],
)
def test_nothing_is_said_about_what_is_as_always(line):
    assert configure(line)[1] == []


def test_stacks_of_a_job_that_hangs_are_shown_unless_the_user_says_no():
    assert config("x.py").stacks_on_hang
    assert config("--stacks-on-hang x.py").stacks_on_hang
    assert not config("--no-stacks-on-hang x.py").stacks_on_hang
    told = refusal("--stacks-on-hang --no-stacks-on-hang x.py")
    assert told == "--stacks-on-hang: cannot be combined with --no-stacks-on-hang"


def test_an_empty_variable_of_torchrun_is_none():
    variables = ("RDZV_ENDPOINT", "RDZV_ID", "MASTER_ADDR", "LOCAL_ADDR")
    made, remarks = configure("x.py", **{f"PET_{name}": "" for name in variables})
    assert remarks == []
    assert made.local_addr is None


@pytest.mark.parametrize("name", ["NPROC_PER_NODE", "NNODES", "MAX_RESTARTS", "REDIRECTS", "TEE"])
@pytest.mark.parametrize("value", ["x", "²", "-", "1:x"])
def test_a_bad_variable_is_called_by_its_own_name(name, value):
    assert refusal("x.py", **{f"PET_{name}": value}).startswith(f"PET_{name} {value!r}: expected")
    flag = "--" + name.lower().replace("_", "-")
    assert refusal(f"{flag}={value} x.py").startswith(f"{flag} {value!r}: expected")


def test_workers_that_the_cluster_has_bound_to_one_cpu(monkeypatch):
    task = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
    task |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    (remark,) = [each for each in configure("x.py", **task)[1] if "CPU" in each]
    assert "one CPU, to which Open MPI has bound" in remark and "--bind-to none" in remark
    assert not [each for each in configure("x.py")[1] if "CPU" in each]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 4})
    assert not [each for each in configure("x.py", **task)[1] if "CPU" in each]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("x.py --nproc-per-node 2", "--nproc-per-node"),
        ("x.py --lr 1 --nproc_per_node=2", "--nproc_per_node"),
        ("-m x --nnodes 2", "--nnodes"),
        ("--nproc-per-node 2 x.py --nproc-per-node 3", None),  # the script has a flag of that name
        ("x.py -- --nproc-per-node 2", None),
        ("x.py --epochs 2", None),
    ],
)
def test_a_flag_after_the_script_is_remarked_on(line, named):
    remarks = configure(line)[1]
    assert [each.partition(" ")[0] for each in remarks] == ([named] if named else [])
