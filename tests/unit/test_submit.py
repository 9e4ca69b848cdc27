"""`rally submit`: what engines are given."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint._core import secret
from rallypoint.errors import ConfigError
from rallypoint.launch.placement import clusters
from rallypoint.launch.placement.clusters import slurm as slurm_cluster
from rallypoint.launch.submit import kubernetes, ray, slurm, ssh, template_files
from rallypoint.launch.submit.command import command
from rallypoint.launch.submit.request import ENGINES, Request, read
from rallypoint.launch.submit.template import FILES, fill
from rallypoint.ray import job_words


def script(request: Request, python: str) -> str:
    text, shown = template_files.read("slurm", "", {})
    return fill(text, slurm.fields(request, python), shown)


def manifest(request: Request) -> str:
    text, shown = template_files.read("k8s", "", {})
    return fill(text, kubernetes.fields(request), shown)


def test_a_script_for_slurm() -> None:
    words = [
        "slurm",
        "--nodes",
        "4",
        "--gpus=8",
        "--partition=big",
        "--time=1:00",
        "--",
        "--max-restarts",
        "2",
        "train.py",
    ]
    text = script(read([*words, "a b"]), "/env/python")
    assert text.splitlines() == [
        "#!/bin/bash",
        *("#SBATCH --job-name=rally", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1"),
        *("#SBATCH --gpus-per-node=8", "#SBATCH --partition=big", "#SBATCH --time=1:00"),
        "# A secret of this job's own, which its tasks inherit, unless there is one for all jobs.",
        'if [ -z "${RALLY_SECRET+x}${RALLY_SECRET_FILE+x}" ] && [ ! -e "${XDG_CONFIG_HOME:-$HOME/.config}/rallypoint/secret" ]; then',
        "    export RALLY_SECRET=$(head -c 32 /dev/urandom | base64)",
        "fi",
        "# rally ends the tasks of a failed job itself, and reports first; srun would kill them meanwhile.",
        "exec srun --kill-on-bad-exit=0 /env/python -m rallypoint run --nproc-per-node=8"
        " --max-restarts 2 train.py 'a b'",
    ]
    subprocess.run(["bash", "-n"], input=text.encode(), check=True, timeout=60)


def secret_of_tasks(folder: Path, env: dict[str, str]) -> str:
    """What a script's tasks find in ``RALLY_SECRET``."""
    srun = folder / "srun"
    srun.write_text('#!/bin/sh\nprintf %s "$RALLY_SECRET"\n')
    srun.chmod(0o755)
    text = script(read(["slurm", "--nodes", "2", "--", "train.py"]), "python")
    done = subprocess.run(
        ["bash"],
        input=text,
        env={"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


def test_the_tasks_of_slurm_have_a_secret_of_their_own_unless_there_is_one(tmp_path: Path) -> None:
    made = {secret_of_tasks(tmp_path, {}) for _ in range(2)}
    assert len(made) == 2
    for each in made:
        secret.check(each, "RALLY_SECRET")
    assert secret_of_tasks(tmp_path, {"RALLY_SECRET": "mine"}) == "mine"
    # `rally run` reports an empty one as a mistake.
    assert secret_of_tasks(tmp_path, {"RALLY_SECRET": ""}) == ""
    assert secret_of_tasks(tmp_path, {"RALLY_SECRET_FILE": "/a/file"}) == ""
    for base in (tmp_path / ".config", tmp_path / "xdg"):
        (base / "rallypoint").mkdir(parents=True)
        (base / "rallypoint" / "secret").write_text("of the user")
    assert secret_of_tasks(tmp_path, {}) == ""
    assert secret_of_tasks(tmp_path, {"XDG_CONFIG_HOME": f"{tmp_path}/xdg"}) == ""


def test_a_job_that_may_be_requeued_keeps_its_output() -> None:
    text = script(read(["slurm", "--", "--requeue-on", "75", "t.py"]), "p")
    lines = text.splitlines()
    assert "#SBATCH --requeue" in lines and "#SBATCH --open-mode=append" in lines
    assert lines[-1].endswith("rallypoint run --requeue-on 75 t.py")


def test_a_range_of_one_number_is_a_fixed_job() -> None:
    request = read(["slurm", "--nodes", "2:2", "--", "t.py"])
    assert (request.nodes, request.min_nodes) == (2, None)
    assert read(["ray", "--nodes", "2:2", "--", "t.py"]).min_nodes is None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_shown_after_an_engine_too(engine: str, word: str) -> None:
    shown: list[str] = []
    assert command([engine, "--nodes", "2", word], shown.append) == 0
    assert shown[0].startswith("usage: rally submit slurm")


def test_a_node_of_the_manifest_knows_where_it_stands() -> None:
    words = [
        "k8s",
        "--image",
        "i",
        "--nodes",
        "3",
        "--gpus",
        "2",
        "--name",
        "net",
        "--",
        "--nproc_per_node=1",
        "train.py",
    ]
    service, job = json.loads(manifest(read(words)))["items"]
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][3:] == ["run", "--nproc_per_node=1", "train.py"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert pod["subdomain"] == service["metadata"]["name"]
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    placement = clusters.detect({**env, "JOB_COMPLETION_INDEX": "1"}, list)
    assert placement is not None
    assert (placement.num_nodes, placement.node_rank) == (3, 1)
    assert placement.master_addr == "net-0.net"


def test_the_pods_of_an_elastic_job_are_replaced() -> None:
    base = "k8s --image i --nodes 4 -- --nnodes"
    _, fixed = json.loads(manifest(read(f"{base} 4 train.py".split())))["items"]
    assert fixed["spec"]["backoffLimit"] == 0
    assert "podFailurePolicy" not in fixed["spec"]
    _, job = json.loads(manifest(read(f"{base}=2:4 train.py".split())))["items"]
    assert job["spec"]["backoffLimit"] == 100
    ignored, ends = job["spec"]["podFailurePolicy"]["rules"]
    assert (ignored["action"], ends["action"]) == ("Ignore", "FailJob")
    assert ends["onExitCodes"] == {"operator": "NotIn", "values": [137, 143]}


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [("", 45), ("--shutdown-timeout 100.5", 116), ("--shutdown-timeout=0", 15)],
)
def test_a_pod_has_the_time_that_its_workers_have(flags: str, seconds: int) -> None:
    words = f"k8s --image i -- {flags} train.py".split()
    _, job = json.loads(manifest(read(words)))["items"]
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds


@pytest.mark.parametrize("text", ["soon", "inf", "nan"])
def test_a_time_to_end_that_is_none_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--shutdown-timeout"):
        manifest(read(["k8s", "--image", "i", "--", "--shutdown-timeout", text, "t.py"]))


def test_kubernetes_replaces_no_dollars() -> None:
    """The kubelet replaces `$(NAME)` by the variable's value, and two dollars by one."""
    _, job = json.loads(manifest(read(["k8s", "--image", "i", "--", "t.py", "a$$", "$(B)"])))[
        "items"
    ]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-2:] == ["a$$$$", "$$(B)"]


def test_a_job_of_kubernetes_without_a_name_gets_one_of_its_own() -> None:
    words = ["k8s", "--image", "i", "--dry-run", *("--", "t.py")]
    shown: list[str] = []
    for _ in range(2):
        assert command(words, shown.append) == 0
    names = []
    for text in shown:
        service, job = json.loads(text)["items"]
        names.append(job["metadata"]["name"])
        assert service["metadata"] == job["metadata"]
        assert job["metadata"]["labels"] == {"rallypoint": names[-1]}
    assert names[0] != names[1]
    assert command([*words[:3], "--name=rallye", *words[3:]], shown.append) == 0
    assert json.loads(shown[-1])["items"][0]["metadata"]["name"] == "rallye"


@pytest.mark.parametrize(
    "words", ["--nodes 4 -- --nnodes 2:4 t.py", "--nodes 2:4 -- t.py", "--nodes=2:4 -- t.py"]
)
def test_an_elastic_job_of_slurm_outlives_a_node(words: str) -> None:
    lines = script(read(["slurm", *words.split()]), "p").splitlines()
    assert "#SBATCH --nodes=4" in lines
    assert "rallypoint run --nnodes" in lines[-1].replace("=", " ") and "2:4 t.py" in lines[-1]
    assert "#SBATCH --no-kill" in lines
    options = shlex.split(lines[-1])
    assert options[1:4] == ["srun", "--kill-on-bad-exit=0", "--no-kill"]
    assert slurm_cluster.ends_with_a_node([*options[1:4], "rally"], {}) == ""


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "pbs -- x.py",
            "slurm",
            "slurm --",
            "slurm --nodes 0 -- x.py",
            "slurm --nodes x -- x.py",
        ),
        *("slurm --partition big -- x.py", "k8s -- x.py", "k8s --image i --time=1 -- x.py"),
        "k8s --image i --name A_b -- x.py",
        *("ssh -- x.py", "ssh --hosts a --nodes 2 -- x.py", "ssh --hosts a"),
        *(
            "slurm --nodes 3:2 -- x.py",
            "slurm --nodes 2: -- x.py",
            "k8s --image i --nodes 0:2 -- x.py",
        ),
        *("slurm --nodes 2:4 -- --nnodes 2:4 x.py", "ssh --hosts a --nodes 2:4 -- x.py"),
        *("ray --nodes 3:2 -- x.py", "ray --nodes a:2 -- x.py", "ray http://x -- x.py"),
    ],
)
def test_what_cannot_be_submitted(text: str) -> None:
    with pytest.raises(ConfigError):
        read(text.split())


@pytest.mark.parametrize("engine", ["slurm", "k8s --image i", "ssh --hosts a", "ray"])
def test_forgotten_dashes_before_the_script_are_named(engine: str) -> None:
    with pytest.raises(ConfigError, match="expected -- before the script .* -- train.py"):
        read([*engine.split(), "train.py", "--lr", "1"])


@pytest.mark.parametrize("engine", ["slurm", "k8s --image i", "ssh --hosts a", "ray"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--nprc 3 x.py", "--nprc: no such flag (did you mean --nproc-per-node?)"),
        ("--max-restarts", "--max-restarts: expected a value (K) after it"),
        ("--on-hang cry x.py", "--on-hang 'cry': expected one of tell, restart, fail"),
        ("--max-restarts 2", "submit: no script given after --"),
        ("--nnodes 2:x x.py", "--nnodes '2:x': expected a number of nodes"),
        ("--nnodes=4:2 x.py", "--nnodes '4:2': expected at least 1 node, and MIN no larger"),
        ("--help", "submit '--help': expected a script after --"),
        ("--requeue-on 0 x.py", "--requeue-on '0': "),
    ],
)
def test_the_flags_of_the_job_are_checked_before_it_is_handed_over(
    engine: str, words: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read([*engine.split(), "--", *words.split()])
    assert str(caught.value).startswith(told)


def test_a_dry_run_hands_over_nothing(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    shown: list[str] = []
    assert command(["slurm", "--dry-run", "--", "x.py"], shown.append) == 0
    assert shown[0].startswith("#!/bin/bash")
    with pytest.raises(ConfigError, match="not installed"):
        command(["slurm", "--", "x.py"], shown.append)


# -- Kubernetes' own word on the manifest ---------------------------------------------------------

MANIFESTS = [
    ["k8s", "--image", "i", "--", "train.py"],
    ["k8s", "--image", "i", "--nodes=4", "--", "--nnodes=2:4", "train.py"],
    ["k8s", "--image", "r/i:1", "--nodes=4", "--gpus=8", "--name=net", "--", "train.py", 'a "b"'],
]


@pytest.mark.parametrize("words", MANIFESTS)
def test_the_published_schemas_take_the_manifest(words: list[str]) -> None:
    """`pip install kubernetes-validate` enables this: it brings the schemas of Kubernetes' releases."""
    validator = pytest.importorskip("kubernetes_validate")
    newest = validator.latest_version()
    for item in json.loads(manifest(read(words)))["items"]:
        for version in ("1.27", newest):
            validator.validate(item, version, strict=True)
        item["spec"]["what"] = 1
        with pytest.raises(validator.ValidationError):
            validator.validate(item, newest, strict=True)


@pytest.mark.parametrize("words", MANIFESTS)
def test_the_client_knows_every_field_of_the_manifest(words: list[str]) -> None:
    """`pip install kubernetes` enables this: fields that its models do not know would be lost in them."""
    client = pytest.importorskip("kubernetes.client")
    api = client.ApiClient()
    for item in json.loads(manifest(read(words)))["items"]:
        model = getattr(client, f"V1{item['kind']}").from_dict(item)
        assert api.sanitize_for_serialization(model) == item


# -- templates ------------------------------------------------------------------------------------


def test_a_line_that_is_an_empty_field_is_left_out() -> None:
    text = "a\n\n  $x\n$x$y\n"
    assert fill(text, {"x": "", "y": "$x $$"}, "t") == "a\n\n$x $$\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a\n$partition",
            r"line 2 '\$partition'.*no such field.*known: name, nodes.*\$\$partition",
        ),
        ("${nodse}", r"did you mean \$nodes"),
        ("echo $1", "a \\$ without a field.*write \\$\\$"),
    ],
)
def test_a_template_with_other_fields(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fill(text, {"name": "", "nodes": ""}, "slurm.sh")


def test_the_first_template_that_is_found(tmp_path: Path, monkeypatch) -> None:
    site, config = tmp_path / "site", tmp_path / "config"
    monkeypatch.setattr(template_files, "SITE", site)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))

    def shown(*words: str) -> str:
        found: list[str] = []
        assert command(["slurm", *words], found.append) == 0
        return found[0]

    ours = (template_files.OURS / "slurm.sh").read_text().rstrip("\n")
    assert shown("--print-template") == ours
    for folder, text in ((site, "site $name"), (config / "rallypoint" / "submit", "mine $name")):
        folder.mkdir(parents=True)
        (folder / "slurm.sh").write_text(text)
        assert shown("--print-template") == text
        assert shown("--dry-run", "--name", "x", "--", "t.py") == text.replace("$name", "x")
    named = tmp_path / "named"
    named.write_text("named")
    assert shown("--template", str(named), "--dry-run", "--", "t.py") == "named"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "nowhere",
            "cannot be read: No such file or directory (check the path; rally submit slurm",
        ),
        ("", "expected a file (is a variable of the shell not set?)"),
        (
            ".",
            "cannot be read: Is a directory (check the path; rally submit slurm --print-template",
        ),
        ("binary", "not a text file (rally submit slurm --print-template shows one)"),
    ],
)
def test_a_template_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        command(["slurm", "--template", name, "--print-template"], print)
    assert str(caught.value).startswith(f"--template {name!r}: {told}")


def test_the_docs_name_every_field() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "clusters" / "templates.md").read_text()
    request = Request(engine="", words=("x",), hosts="a")
    known = {
        "slurm": slurm.fields(request, "p"),
        "k8s": kubernetes.fields(request),
        "ssh": ssh.fields(request, "p", "/", {}),
        "ray": ray.fields(request, "ray"),
    }
    for engine, file in FILES.items():
        (row,) = [line for line in docs.splitlines() if line.startswith(f"| `{file}`")]
        assert {each.strip("`$") for each in row.split("|")[2].replace(",", " ").split()} == set(
            known[engine]
        )


# -- ssh and Ray ----------------------------------------------------------------------------------


def test_a_host_on_which_a_jobs_files_cannot_be_made_says_so(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": "/dev/null"}
    orders = ssh.DetachedOrders(name="train", folder=str(tmp_path), env=env, words=["t.py"])
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "submit", "--detached"],
        input=orders.to_line() + "\n",
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot make /dev/null/rallypoint/jobs/train-" in line
    assert "set XDG_STATE_HOME on this host to a writable folder" in line


def test_a_script_for_ssh(monkeypatch, tmp_path: Path) -> None:
    """A fake ssh takes what the script gives it."""
    monkeypatch.setenv("NCCL_DEBUG", "it's $HOME")
    monkeypatch.setenv("RALLY_SECRET", "0123456789abcdef")
    shown: list[str] = []
    words = ["ssh", "--hosts", "me@a,b:8", "--gpus=2", "--ssh-options", "-p 2222", "--dry-run"]
    assert command([*words, "--", "--max-restarts", "2", "train.py", "a b"], shown.append) == 0
    (tmp_path / "ssh").write_text('#!/bin/sh\nprintf "%s\\n" "$@"; cat\n')
    (tmp_path / "ssh").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash"], input=shown[0], text=True, env=env, capture_output=True)
    *options, host, remote, line = done.stdout.splitlines()
    assert (options[:3], host) == (["-T", "-p", "2222"], "me@a")
    assert remote.endswith("-m rallypoint submit --detached")
    told = ssh.DetachedOrders.from_line(line.encode())
    assert told.words == [
        *("--hosts=me@a,b:8", "--nproc-per-node=2", "--max-restarts", "2", "train.py", "a b"),
    ]
    assert told.env["NCCL_DEBUG"] == "it's $HOME"
    assert "0123456789abcdef" not in shown[0]


def test_a_script_for_ray_is_read_back() -> None:
    words = ["ray", "--nodes=1:2", "--gpus", "4", "--working-dir=/my files", "--dry-run", "--"]
    shown: list[str] = []
    assert (
        command([*words, "-r3", "--nproc_per_node", "2", "--", "train.py", "a b"], shown.append)
        == 0
    )
    assert "'--working-dir=/my files'" in shown[0]
    line = shown[0].splitlines()[-1]
    _, _, entry = line.partition(" -- ")
    job = job_words.read(shlex.split(entry)[3:])
    assert (job.target, job.flags) == (("train.py", "a b"), ("-r3",))
    assert (job.num_nodes, job.workers, job.resources) == ((1, 2), 2, {"GPU": 4.0})


def test_the_cluster_of_ray_gives_the_script_the_words_as_they_are() -> None:
    """`ray job submit` joins its words with `list2cmdline`, and a shell on the cluster reads the result."""
    words = ["t.py", "u?a=1&y=2", "${now:%Y}", "it's", "*", "a b", "$(id)", 'say "x"', "é\n;", ""]
    shown: list[str] = []
    assert command(["ray", "--dry-run", "--", *words], shown.append) == 0
    line = shlex.split(shown[0].splitlines()[-1])
    text = subprocess.list2cmdline(line[line.index("--") + 1 :])
    program = "import json, sys; print(json.dumps(sys.argv[1:]))"
    text = text.replace("python -m rallypoint.ray", shlex.join([sys.executable, "-c", program]), 1)
    out = subprocess.run(text, shell=True, capture_output=True, check=True).stdout
    assert job_words.read(json.loads(out)).target == tuple(words)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_rays_own_parser_takes_it() -> None:
    program = """
import json, sys
from ray.dashboard.modules.job.cli import submit
context = submit.make_context("submit", json.loads(sys.argv[1]))
print(json.dumps({name: context.params[name] for name in ("address", "metadata_json", "entrypoint", "working_dir")}))
"""
    words = [
        "ray",
        "--address=http://h:8265",
        "--working-dir=.",
        "--name=n",
        "--dry-run",
        "--",
        "x.py",
        "a b",
    ]
    shown: list[str] = []
    assert command(words, shown.append) == 0
    line = shlex.split(shown[0].splitlines()[-1])
    assert line[0] == "exec"
    assert line[2:4] == ["job", "submit"]
    out = subprocess.run(
        [sys.executable, "-c", program, json.dumps(line[4:])], capture_output=True, check=True
    ).stdout
    found = json.loads(out)
    assert found["address"] == "http://h:8265"
    assert json.loads(found["metadata_json"]) == {"job_name": "n"}
    assert job_words.read(found["entrypoint"][3:]).target == ("x.py", "a b")


@pytest.mark.parametrize(
    "text",
    [
        "--nodes",
        "--nodes=x -- x.py",
        "--what=1 -- x.py",
        "--nodes=2",
        "--nodes=2 -- --nproc-per-node=gpu x.py",
        *("--words=x", "--words=W10=", "--words=eyJ4IjogMX0=", "--words=é"),
    ],
)
def test_what_cannot_run_on_ray(text: str) -> None:
    with pytest.raises(ConfigError):
        job_words.read(text.split())
