"""`--numa-binding`: which workers get which CPUs, on machines that we do not have and on this one."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from rallypoint.errors import ConfigError
from rallypoint.launch.placement.numa import (
    NUMA_BINDINGS,
    Cpu,
    NumaBinding,
    Topology,
    choose_cpus,
    format_cpus,
    parse_cpus,
    visible_devices,
)
from rallypoint.launch.placement.topology import read_topology


def machine(
    *,
    sockets: int = 1,
    nodes: int = 1,
    complexes: int = 1,
    cores: int = 4,
    threads: int = 1,
    allowed: str | None = None,
    devices: tuple[int | None, ...] = (),
    caches: bool = True,
) -> Topology:
    """``nodes`` per socket, ``complexes`` per node, ``cores`` per complex, numbered as Linux on x86
    does it: the first threads of all cores, then the second threads."""
    places = list(itertools.product(range(sockets), range(nodes), range(complexes), range(cores)))
    cpus = []
    for thread in range(threads):
        for core, (socket, node, complex_, _) in enumerate(places):
            first_of_complex = ((socket * nodes + node) * complexes + complex_) * cores
            cpus.append(
                Cpu(
                    index=thread * len(places) + core,
                    node=socket * nodes + node,
                    socket=socket,
                    core=core,
                    cache=first_of_complex if caches else None,
                )
            )
    every = frozenset(cpu.index for cpu in cpus)
    return Topology(
        cpus=tuple(cpus),
        allowed=every if allowed is None else parse_cpus(allowed),
        device_nodes=devices,
    )


def bound(mode: NumaBinding, topology: Topology, workers: int) -> list[str]:
    return [format_cpus(choose_cpus(mode, topology, rank, workers)) for rank in range(workers)]


LAPTOP = machine(cores=4, threads=2)  # CPUs 0-3, and 4-7 their second threads
# 2 sockets of 2 nodes of 2 complexes of 2 cores of 2 threads: node n has cores 4n to 4n+3, with second threads 16 higher.
SERVER = machine(sockets=2, nodes=2, complexes=2, cores=2, threads=2)
# GPUs as on many 8-GPU boards: not in the order of the nodes.
BOARD = machine(
    sockets=2, nodes=2, complexes=2, cores=2, threads=2, devices=(1, 1, 0, 0, 3, 3, 2, 2)
)

TWO_CORES_EACH = [f"{core}-{core + 1},{core + 16}-{core + 17}" for core in range(0, 16, 2)]


@pytest.mark.parametrize(
    ("topology", "mode", "expected"),
    [
        (LAPTOP, "node", ["0-7", "0-7"]),
        (LAPTOP, "socket", ["0-7", "0-7"]),
        (LAPTOP, "exclusive", ["0-1,4-5", "2-3,6-7"]),
        (LAPTOP, "exclusive", ["0-1,4-5", "2,6", "3,7"]),  # leftover cores go to the first
        (LAPTOP, "core-complex", ["0-7", "0-7"]),
        # Without GPUs: spread over nodes in rank order.
        (SERVER, "node", ["0-3,16-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
        (SERVER, "node", ["0-3,16-19", "8-11,24-27"]),
        (SERVER, "node", ["0-3,16-19"]),
        (
            SERVER,
            "node",
            ["0-3,16-19"] * 2 + ["4-7,20-23"] * 2 + ["8-11,24-27"] * 2 + ["12-15,28-31"] * 2,
        ),
        (SERVER, "socket", ["0-7,16-23"] * 2 + ["8-15,24-31"] * 2),
        (
            SERVER,
            "exclusive",
            TWO_CORES_EACH,
        ),
        (SERVER, "core-complex", ["0-1,16-17", "8-9,24-25"]),
        (
            SERVER,
            "core-complex",
            TWO_CORES_EACH,
        ),
        # With GPUs: where the GPU is.
        (
            BOARD,
            "node",
            ["4-7,20-23"] * 2 + ["0-3,16-19"] * 2 + ["12-15,28-31"] * 2 + ["8-11,24-27"] * 2,
        ),
        (BOARD, "socket", ["0-7,16-23"] * 4 + ["8-15,24-31"] * 4),
        # A worker's share does not depend on how many of the node's GPUs this job uses.
        (BOARD, "exclusive", ["4-5,20-21"]),
        (BOARD, "exclusive", ["4-5,20-21", "6-7,22-23", "0-1,16-17"]),
        (BOARD, "core-complex", ["4-5,20-21", "6-7,22-23", "0-1,16-17"]),
        # Three GPUs on a node of two complexes: the third shares with the first.
        (
            machine(complexes=2, cores=2, devices=(0, 0, 0)),
            "core-complex",
            ["0-1", "2-3", "0-1"],
        ),
        # The number of cores matters more than the number of threads.
        (
            machine(complexes=2, cores=3, threads=2, allowed="0-1,6-7,3-5"),
            "core-complex",
            ["3-5", "0-1,6-7"],
        ),
        # The kernel does not know the GPUs' node: it does not matter with one node; with several, workers are spread.
        (machine(cores=4, devices=(None, None, None, None)), "exclusive", ["0", "1"]),
        (machine(sockets=2, cores=2, devices=(1, None)), "node", ["0-1", "2-3"]),
        # With more workers than GPUs, nobody can tell which worker uses which.
        (machine(sockets=2, cores=2, devices=(1,)), "node", ["0-1", "2-3"]),
        # A virtual machine whose one node spans both sockets.
        (
            Topology(
                cpus=tuple(
                    Cpu(index=i, node=0, socket=i // 2, core=i, cache=None) for i in range(4)
                ),
                allowed=frozenset(range(4)),
            ),
            "socket",
            ["0-3"],
        ),
    ],
)
def test_bindings(topology: Topology, mode: NumaBinding, expected: list[str]) -> None:
    assert bound(mode, topology, len(expected)) == expected


@pytest.mark.parametrize(
    ("allowed", "mode", "expected"),
    [
        # SERVER: node 0 has cores 0-3, whose second threads are 16-19.
        ("0-3", "node", ["0-3", "0-3"]),  # one node left: no second threads, no other nodes
        ("0-3", "exclusive", ["0-1", "2-3"]),
        ("0-5,16-21", "node", ["0-3,16-19", "0-3,16-19", "4-5,20-21"]),
        ("3,8-11", "exclusive", ["3", "8-9", "10", "11"]),  # 1 + 3 workers, like the cores
        ("0,2-3,16,18", "core-complex", ["2-3,18"]),  # the complex with more cores first
        ("0,2,18", "core-complex", ["2,18", "0"]),  # same number of cores: more threads first
        # Cores are counted, not threads, of which node 0 has twice as many here.
        ("0-7,16-19", "node", ["0-3,16-19", "0-3,16-19", "4-7", "4-7"]),
        ("4-7,12-15", "socket", ["4-7", "12-15"]),
    ],
)
def test_a_cpuset_is_respected(allowed: str, mode: NumaBinding, expected: list[str]) -> None:
    topology = machine(sockets=2, nodes=2, complexes=2, cores=2, threads=2, allowed=allowed)
    assert bound(mode, topology, len(expected)) == expected


def test_a_gpu_whose_node_is_outside_the_cpuset_is_an_error_that_names_both() -> None:
    topology = machine(sockets=2, cores=4, devices=(0, 1), allowed="0-2")
    assert choose_cpus("node", topology, 0, 2) == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"local rank 1 is on NUMA node 1.*CPUs 0-2"):
        choose_cpus("node", topology, 1, 2)


def test_exclusive_with_more_workers_than_cores_is_an_error_and_the_other_modes_share() -> None:
    with pytest.raises(ConfigError, match=r"NUMA node 0 has 4 physical cores.*5 workers"):
        choose_cpus("exclusive", LAPTOP, 0, 5)
    for mode in ("node", "socket", "core-complex"):
        assert bound(mode, LAPTOP, 5) == ["0-7"] * 5
    crowded = machine(sockets=2, cores=1, devices=(0, 0, 1))
    assert choose_cpus("exclusive", crowded, 2, 3) == {1}
    with pytest.raises(ConfigError, match="fewer than the 2 workers or GPUs"):
        choose_cpus("exclusive", crowded, 1, 3)


def test_core_complex_without_a_described_cache_is_an_error_and_the_other_modes_work() -> None:
    topology = machine(cores=2, caches=False)
    with pytest.raises(ConfigError, match=r"share a cache.*CPU 0-1"):
        choose_cpus("core-complex", topology, 0, 1)
    assert bound("exclusive", topology, 2) == ["0", "1"]


def test_a_cpuset_of_offline_cpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"\(9\) is online"):
        choose_cpus("node", machine(cores=4, allowed="9"), 0, 1)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_no_worker_here_is_an_error(rank: int) -> None:
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        choose_cpus("node", LAPTOP, rank, 2)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    shape = {
        name: draw(st.integers(1, 3))
        for name in ("sockets", "nodes", "complexes", "cores", "threads")
    }
    whole = machine(**shape)
    allowed = draw(st.sets(st.sampled_from([cpu.index for cpu in whole.cpus]), min_size=1))
    nodes = st.sampled_from([*sorted({cpu.node for cpu in whole.cpus}), None])
    return Topology(
        cpus=whole.cpus,
        allowed=frozenset(allowed),
        device_nodes=tuple(draw(st.lists(nodes, max_size=6))),
    )


@given(topologies(), st.integers(1, 9), st.sampled_from(NUMA_BINDINGS))
def test_a_worker_gets_allowed_cpus_or_an_error_and_exclusive_shares_are_disjoint(
    topology: Topology, workers: int, mode: NumaBinding
) -> None:
    chosen = []
    for rank in range(workers):
        try:
            cpus = choose_cpus(mode, topology, rank, workers)
        except ConfigError:
            # Without GPUs there is only one excuse: more workers than cores.
            cores = {cpu.core for cpu in topology.usable}
            assert topology.device_nodes or (mode == "exclusive" and workers > len(cores))
            continue
        assert cpus
        assert cpus <= topology.allowed
        chosen.append(cpus)
    if mode == "exclusive":
        core_of = {cpu.index: cpu.core for cpu in topology.cpus}
        cores_of = [{core_of[cpu] for cpu in cpus} for cpus in chosen]
        assert sum(map(len, cores_of)) == len(set().union(*cores_of))


@given(topologies(), st.integers(1, 9))
def test_without_gpus_nodes_of_equal_size_get_equal_numbers_of_workers(
    topology: Topology, workers: int
) -> None:
    whole = Topology(cpus=topology.cpus, allowed=frozenset(cpu.index for cpu in topology.cpus))
    nodes = {cpu.node for cpu in whole.cpus}
    node_of = {cpu.index: cpu.node for cpu in whole.cpus}
    placed = [node_of[min(choose_cpus("node", whole, r, workers))] for r in range(workers)]
    assert placed == sorted(placed)
    counts = [placed.count(node) for node in nodes]
    assert max(counts) - min(counts) <= 1


# ---- the kernel's and CUDA's notations ----------------------------------------------------------


@given(st.frozensets(st.integers(0, 300)))
def test_cpu_lists_survive_the_round_trip(cpus: frozenset[int]) -> None:
    text = format_cpus(cpus)
    assert parse_cpus(text + "\n") == cpus
    runs = sum(1 for cpu in cpus if cpu - 1 not in cpus)
    assert len(text.split(",")) == max(runs, 1)


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1-2-3"])
def test_what_is_no_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpus(text)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, (0, 1, 2, 3)),
        ("", ()),
        ("2", (2,)),
        ("3,1", (3, 1)),
        (" 3, 1 ", (3, 1)),
        ("0,-1,2", (0,)),
        ("0,9,2", (0,)),
        ("GPU-bb", (1,)),
        ("GPU-aa11,0", (0, 0)),
        ("GPU-", (None,)),  # three of them start so
        ("1,MIG-5c0a", (1, None)),
        ("GPU-dddd", (None,)),
    ],
)
def test_visible_devices_as_cuda_counts_them(
    setting: str | None, expected: tuple[int | None, ...]
) -> None:
    devices = ["GPU-aa11-22", "GPU-bb11-22", "GPU-cc11-22", None]
    assert visible_devices(setting, devices) == expected


# ---- reading /sys ------------------------------------------------------------------------------


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def fake_sys(root: Path, topology: Topology) -> Path:
    """A /sys as Linux would write it for ``topology``; returns its root."""
    sys_root = root / "sys"
    system = sys_root / "devices/system"
    write(system / "cpu/online", format_cpus(cpu.index for cpu in topology.cpus))
    for node in {cpu.node for cpu in topology.cpus}:
        on_node = format_cpus(cpu.index for cpu in topology.cpus if cpu.node == node)
        write(system / f"node/node{node}/cpulist", on_node)
    write(system / "node/node9/cpulist", "")  # has memory but no CPUs
    write(system / "node/possible", "0-9")
    for cpu in topology.cpus:
        folder = system / f"cpu/cpu{cpu.index}"
        siblings = format_cpus(c.index for c in topology.cpus if c.core == cpu.core)
        write(folder / "topology/thread_siblings_list", siblings)
        write(folder / "topology/physical_package_id", cpu.socket)
        if cpu.cache is None:
            continue
        sharers = format_cpus(c.index for c in topology.cpus if c.cache == cpu.cache)
        caches = [(1, "Data", siblings), (1, "Instruction", siblings), (3, "Unified", sharers)]
        caches.append((2, "Unified", siblings))  # in any order
        for index, (level, kind, shared) in enumerate(caches):
            write(folder / f"cache/index{index}/level", level)
            write(folder / f"cache/index{index}/type", kind)
            write(folder / f"cache/index{index}/shared_cpu_list", shared)
    return sys_root


def add_device(
    sys_root: Path, address: str, node: int, *, vendor: str = "0x10de", kind: str = "0x030200"
) -> None:
    folder = sys_root / "bus/pci/devices" / address
    write(folder / "vendor", vendor)
    write(folder / "class", kind)
    write(folder / "numa_node", node)


NOTHING = Path("/nonexistent")


@pytest.mark.parametrize(
    "topology", [LAPTOP, SERVER, machine(cores=3, caches=False)], ids=["laptop", "server", "vm"]
)
def test_what_is_written_in_sys_is_what_is_read(tmp_path: Path, topology: Topology) -> None:
    sys_root = fake_sys(tmp_path, topology)
    found = read_topology(sys_root, proc_root=NOTHING, allowed=frozenset({0, 2}))
    assert sorted(found.cpus, key=lambda c: c.index) == sorted(topology.cpus, key=lambda c: c.index)
    assert found.allowed == {0, 2}
    assert found.device_nodes == ()


def test_offline_cpus_are_not_asked_about(tmp_path: Path) -> None:
    sys_root = fake_sys(tmp_path, machine(cores=4))
    write(sys_root / "devices/system/cpu/online", "0-1,3")
    (sys_root / "devices/system/cpu/cpu2/topology/thread_siblings_list").unlink()
    assert [cpu.index for cpu in read_topology(sys_root, proc_root=NOTHING).cpus] == [0, 1, 3]


def test_a_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    sys_root = fake_sys(tmp_path, machine(cores=2))
    for path in sorted((sys_root / "devices/system/node").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (sys_root / "devices/system/node").rmdir()
    add_device(sys_root, "0000:01:00.0", 0)
    (sys_root / "bus/pci/devices/0000:01:00.0/numa_node").unlink()
    topology = read_topology(sys_root, proc_root=NOTHING, allowed=frozenset({0, 1}))
    assert {cpu.node for cpu in topology.cpus} == {0}
    assert choose_cpus("node", topology, 0, 1) == {0, 1}


def test_gpus_are_found_in_pci_order_and_other_devices_are_not_gpus(tmp_path: Path) -> None:
    sys_root = fake_sys(tmp_path, SERVER)
    add_device(sys_root, "10000:01:00.0", 3)  # a longer domain sorts after the others
    add_device(sys_root, "fffe:1b:00.0", 2)
    add_device(sys_root, "0000:1b:00.0", 1, kind="0x030000")
    add_device(sys_root, "0000:1b:00.1", 1, kind="0x040300")  # the GPU's audio
    add_device(sys_root, "0000:05:00.0", 0, kind="0x068000")  # an NVSwitch
    add_device(sys_root, "0000:03:00.0", 0, vendor="0x1a03", kind="0x030000")  # the BMC's display
    add_device(sys_root, "0000:06:00.0", 0, vendor="0x1002", kind="0x030000")  # built-in graphics
    assert read_topology(sys_root, proc_root=NOTHING).device_nodes == (1, 2, 3)


def test_amd_accelerators_are_gpus_and_their_variables_compose(tmp_path: Path) -> None:
    sys_root = fake_sys(tmp_path, SERVER)
    for number in range(4):
        kind = "0x120000" if number % 2 else "0x038000"
        add_device(sys_root, f"0000:{number:02x}:00.0", number, vendor="0x1002", kind=kind)

    def nodes(**env: str) -> tuple[int | None, ...]:
        return read_topology(sys_root, proc_root=NOTHING, env=env).device_nodes

    assert nodes() == (0, 1, 2, 3)
    assert nodes(ROCR_VISIBLE_DEVICES="3,2,1", HIP_VISIBLE_DEVICES="2,0") == (1, 3)
    assert nodes(CUDA_VISIBLE_DEVICES="2") == (2,)
    assert nodes(HIP_VISIBLE_DEVICES="1", CUDA_VISIBLE_DEVICES="2") == (1,)


def test_visible_devices_decide_which_gpu_a_local_rank_uses(tmp_path: Path) -> None:
    sys_root = fake_sys(tmp_path, SERVER)
    for number, node in enumerate([0, 1, 2, 3]):
        add_device(sys_root, f"0000:{number:02x}:00.0", node)
    every = frozenset(cpu.index for cpu in SERVER.cpus)
    topology = read_topology(
        sys_root, proc_root=NOTHING, allowed=every, env={"CUDA_VISIBLE_DEVICES": "3,1"}
    )
    assert topology.device_nodes == (3, 1)
    assert bound("node", topology, 2) == ["12-15,28-31", "4-7,20-23"]
    hidden = read_topology(sys_root, proc_root=NOTHING, env={"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.device_nodes == ()


def test_a_container_sees_its_own_gpus_and_not_all_that_sys_lists(tmp_path: Path) -> None:
    sys_root = fake_sys(tmp_path, SERVER)
    for number, node in enumerate([0, 1, 2, 3]):
        add_device(sys_root, f"0000:{number + 10:02x}:00.0", node)
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    write(gpus / "0000:0b:00.0/information", "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-aaaa-1")
    write(gpus / "0000:0D:00.0/information", "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-bbbb-2")

    def nodes(**env: str) -> tuple[int | None, ...]:
        return read_topology(sys_root, proc_root=tmp_path / "proc", env=env).device_nodes

    assert nodes() == (1, 3)
    assert nodes(CUDA_VISIBLE_DEVICES="1") == (3,)
    assert nodes(CUDA_VISIBLE_DEVICES="GPU-bbbb-2,GPU-aaaa") == (3, 1)
    assert nodes(CUDA_VISIBLE_DEVICES="MIG-1") == (None,)


def test_a_gpu_of_unknown_node_is_unknown(tmp_path: Path) -> None:
    sys_root = fake_sys(tmp_path, SERVER)
    add_device(sys_root, "0000:01:00.0", -1)
    assert read_topology(sys_root, proc_root=NOTHING).device_nodes == (None,)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cpu/online", None),
        ("cpu/online", "all"),
        ("cpu/online", ""),
        ("node/node0/cpulist", None),
        ("node/node0/cpulist", "0"),  # CPU 1 is on no node
        ("cpu/cpu1/topology/thread_siblings_list", None),
        ("cpu/cpu1/topology/thread_siblings_list", "x"),
        ("cpu/cpu1/topology/physical_package_id", None),
        ("cpu/cpu1/topology/physical_package_id", "first"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, path: str, text: str | None) -> None:
    sys_root = fake_sys(tmp_path, machine(cores=2))
    file = sys_root / "devices/system" / path
    file.unlink() if text is None else write(file, text)
    with pytest.raises(ConfigError) as caught:
        read_topology(sys_root, proc_root=NOTHING)
    assert caught.value.field == "--numa-binding"
    assert path.replace("node0", "node*") in str(caught.value).replace("node0", "node*")


def test_no_sys_at_all_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"devices/system/cpu/online.*leave out --numa-binding"):
        read_topology(tmp_path / "sys")


@pytest.mark.skipif(
    not Path("/sys/devices/system/cpu/online").exists(), reason="this machine has no sysfs"
)
def test_this_machine() -> None:
    mine = os.sched_getaffinity(0)
    assert read_topology().allowed == mine
    # Ignores this machine's GPUs, if any: a cpuset may exclude the first one's node.
    topology = read_topology(env={"CUDA_VISIBLE_DEVICES": ""})
    assert topology.device_nodes == ()
    assert mine <= {cpu.index for cpu in topology.cpus}
    for mode in ("node", "socket", "exclusive"):
        cpus = choose_cpus(mode, topology, 0, 1)
        assert cpus
        assert cpus <= mine
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, choose_cpus("node", topology, 0, 1))  # the kernel accepts it
    finally:
        os.sched_setaffinity(0, before)
