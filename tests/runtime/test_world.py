"""`init`: devices, backends, CPU cores, logs and rendezvous; the sp_aurora names for it; the checksum command."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import distributed as _distributed
from typer.testing import CliRunner

import meshflash
from benchmarks.counting_store import CountingStore, MemoryStore
from meshflash.check import checksum
from meshflash.cli import app
from meshflash.integrations.compat import sp_aurora
from meshflash.runtime import cores, devices, rendezvous, world
from meshflash.runtime.devices import RankInfo, choose_backend
from meshflash.runtime.launchers import LaunchError, Place
from meshflash.runtime.log import log, set_up_logging
from runtime import jobs
from runtime.jobs import free_port, run

dist = _distributed
CUDA, BOTH = ("nccl", "gloo"), ("xccl", "gloo")


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    """Remove the variables of launchers, and shut down after each test."""
    for name in list(os.environ):
        if name.startswith(jobs.RANK_VARIABLES):
            monkeypatch.delenv(name)
    yield
    meshflash.shutdown()


def test_single_process_needs_no_process_group():
    with meshflash.init() as this_rank:
        assert meshflash.init() is this_rank
        assert (
            this_rank.rank,
            this_rank.world_size,
            this_rank.local_rank,
            this_rank.local_world_size,
            this_rank.node,
        ) == (0, 1, 0, 1, 0)
        assert (this_rank.launcher, this_rank.backend, this_rank.device.type) == ("single", None, devices.kind_here())
        assert not dist.is_initialized()
        job = world.current_job()
        assert job is not None
        assert job.world is this_rank
        assert meshflash.init(backend="gloo") is this_rank  # without a group the backend does not matter
    assert world.current_job() is None
    meshflash.shutdown()  # a second call is allowed


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_timeout_must_be_a_positive_number(timeout):
    with pytest.raises(ValueError, match="expected seconds > 0"):
        meshflash.init(timeout=timeout)


def test_existing_process_group_is_adopted_and_survives_shutdown(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        this_rank = meshflash.init()
        assert (this_rank.rank, this_rank.world_size, this_rank.backend) == (0, 1, "gloo")
        meshflash.shutdown()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def adopt_group(rank, world, group):
    """Return rank and world size that `init` reads from the existing group."""
    this_rank = meshflash.init()
    assert meshflash.init() is this_rank
    return this_rank.rank, this_rank.world_size


def test_init_adopts_a_group_made_after_another_ended(pool):
    for world_size in (2, 3, 2):
        assert pool.run(world_size, adopt_group) == [(rank, world_size) for rank in range(world_size)]


def init_with_late_rank(rank, world_size, group, port, file):
    """Create the group later on rank 1 than on rank 0; return whether rank 1 had it when `init` returned."""
    dist.destroy_process_group()
    create = dist.init_process_group

    def create_late(*arguments, **more):
        create(*arguments, **more)
        if rank == 1:
            time.sleep(0.5)
            file.touch()

    world.dist.init_process_group = create_late
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        with meshflash.init():
            return file.exists()
    finally:
        world.dist.init_process_group = create
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name)


def test_init_returns_only_after_all_ranks_have_the_group(pool, tmp_path):
    """A rank that ends at once must not close connections that other ranks still open."""
    assert pool.run(2, init_with_late_rank, free_port(), tmp_path / "made") == [True, True]


def ranks(kind, backends, *places):
    """Return the info of ranks with this kind of device; a place is (host, device)."""
    return [RankInfo(host, kind, device, backends) for host, device in places]


@pytest.mark.parametrize(
    ("infos", "backend", "reason"),
    [
        (ranks("cpu", ("gloo",), ("a", ""), ("b", "")), "gloo", ""),
        (ranks("cuda", CUDA, ("a", "1"), ("a", "2")), "cpu:gloo,cuda:nccl", ""),
        (ranks("cuda", CUDA, ("a", "1"), ("b", "1")), "cpu:gloo,cuda:nccl", ""),
        (ranks("cuda", CUDA, ("a", "1"), ("a", "1")), "gloo", "ranks share a device, which nccl refuses"),
        (ranks("cuda", ("gloo",), ("a", "1"), ("a", "2")), "gloo", "nccl is missing on some rank"),
        (ranks("cuda", CUDA, ("a", "1")) + ranks("cuda", ("gloo",), ("a", "2")), "gloo", "missing on some rank"),
        (ranks("xpu", BOTH, ("a", "1"), ("a", "2")), "cpu:gloo,xpu:xccl", ""),
        (ranks("xpu", ("ccl", "gloo"), ("a", "1"), ("a", "2")), "ccl", "xccl is not in this build of torch"),
        (ranks("xpu", ("gloo",), ("a", "1"), ("a", "2")), "gloo", "xccl and ccl are missing"),
    ],
)
def test_backend_is_chosen_from_the_info_of_all_ranks(infos, backend, reason):
    chosen, why = choose_backend(infos)
    assert chosen == backend
    assert reason in why
    assert bool(reason) == bool(why)


def test_backend_can_be_forced_if_all_ranks_have_it():
    infos = ranks("cuda", CUDA, ("a", "1"), ("a", "2"))
    assert choose_backend(infos, "gloo") == ("gloo", "")
    assert choose_backend(infos, "cpu:gloo,cuda:nccl") == ("cpu:gloo,cuda:nccl", "")
    with pytest.raises(ValueError, match=r"backend='xccl': rank 0, 1 has no xccl; it has nccl, gloo"):
        choose_backend(infos, "xccl")


def test_ranks_with_different_kinds_of_devices_are_refused():
    infos = ranks("cuda", CUDA, ("a", "1")) + ranks("cpu", ("gloo",), ("a", ""))
    with pytest.raises(ValueError, match=r"kinds of devices \(cpu: rank 1; cuda: rank 0\).*CUDA_VISIBLE_DEVICES"):
        choose_backend(infos)


def test_more_ranks_than_devices_share_them(monkeypatch):
    monkeypatch.setattr(devices, "count", lambda kind: 2 if kind == "xpu" else 0)
    assert devices.kind_here() == "xpu"
    assert [devices.device_of(rank).index for rank in range(4)] == [0, 1, 0, 1]


def test_peak_memory_counts_cpu_tensors():
    before = meshflash.peak_memory("cpu")
    tensor = torch.ones(2**24 + before // 4)
    assert meshflash.peak_memory(torch.device("cpu")) >= tensor.nbytes


def test_near_cores_are_those_of_the_numa_node_of_a_device_or_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    assert cores.near_device("0000:17:00.0") == ()
    assert cores.near_rank(0, 4) == ()
    for node, text in enumerate(("0-3,8-9", "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    pci = tmp_path / "sys/bus/pci/devices/0000:17:00.0"
    pci.mkdir(parents=True)
    (pci / "numa_node").write_text("1\n")
    assert cores.near_device("0000:17:00.0") == (4, 5, 6, 7)
    (pci / "numa_node").write_text("-1\n")
    assert cores.near_device("0000:17:00.0") == ()
    assert [cores.near_rank(rank, 4) for rank in range(4)] == [(0, 1, 2, 3, 8, 9)] * 2 + [(4, 5, 6, 7)] * 2
    assert cores.near_rank(0, 1) == ()


def test_local_ranks_divide_their_cores_evenly():
    whole = tuple(range(8))
    assert [cores.share_of(rank, [whole] * 3) for rank in range(3)] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    near = [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2
    assert [cores.share_of(rank, [whole] * 4, near) for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [cores.share_of(rank, [(0, 1)] * 3) for rank in range(3)] == [(0,), (0,), (1,)]
    assert cores.share_of(0, [(0,), (1,)]) == (0,)


def test_process_is_bound_to_its_cores_and_uses_one_thread_per_core(monkeypatch):
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores), raising=False)
    monkeypatch.setattr(cores, "cores_here", lambda: (0, 1, 2, 3))
    before = torch.get_num_threads()
    try:
        cores.take((1, 2))
        assert (bound, torch.get_num_threads()) == ([{1, 2}], 2)
        monkeypatch.setenv("MESHFLASH_BIND", "0")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        cores.take((1, 2, 3))
        assert (bound, torch.get_num_threads()) == ([{1, 2}], 2)
    finally:
        torch.set_num_threads(before)


def test_log_lines_begin_with_the_rank(monkeypatch, capsys):
    monkeypatch.setenv("MESHFLASH_LOG", "debug")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.delenv("CCL_LOG_LEVEL", raising=False)
    set_up_logging(3)
    assert (os.environ["NCCL_DEBUG"], os.environ["CCL_LOG_LEVEL"]) == ("INFO", "info")
    assert log.level == logging.DEBUG
    assert (
        log.handlers[0].format(logging.LogRecord("x", 10, "", 0, "here", (), None)) == "[rank 3] meshflash DEBUG: here"
    )
    monkeypatch.setenv("MESHFLASH_LOG", "loud")
    with pytest.raises(ValueError, match="MESHFLASH_LOG='loud': expected one of debug, info, warning, error"):
        set_up_logging(0)
    monkeypatch.setenv("MESHFLASH_LOG", "warning")
    set_up_logging(0)


def test_unknown_address_of_rank_0_error_names_the_variables_to_set(monkeypatch):
    rank_on_two_nodes = Place("MPI", 1, 4, 0, 2)
    with pytest.raises(LaunchError, match="rank 1 of 4, started by MPI, does not know where rank 0 is: set"):
        rendezvous.open_rendezvous(rank_on_two_nodes, 1.0)
    monkeypatch.setattr(rendezvous, "starter", lambda: "")
    with pytest.raises(LaunchError, match="cannot tell its job from others on this machine: set MASTER_ADDR="):
        rendezvous.open_rendezvous(Place("variables", 1, 2, 1, 2), 1.0)
    monkeypatch.setenv("MASTER_ADDR", "here")
    for port in ("http", "70000", "0", "-1", "²"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(LaunchError, match=f"MASTER_PORT='{port}': expected a number from 1 to 65535"):
            rendezvous.open_rendezvous(rank_on_two_nodes, 1.0)


def test_error_names_the_whole_timeout_after_retries(monkeypatch):
    class ClosingStore:
        """A fake of the store of an earlier rendezvous, which answers once and never opens again."""

        waits: ClassVar[list[float]] = []

        def __init__(self, *_, timeout, **__):
            self.waits.append(timeout.total_seconds())
            if len(self.waits) > 1:
                raise RuntimeError("nobody is there")

        def set_timeout(self, _):
            return None

        def wait(self, *_):
            raise RuntimeError("not opened")

    monkeypatch.setattr(rendezvous.dist, "TCPStore", ClosingStore)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(LaunchError, match=r"rank 1 of 2 found no rank 0 within 5 s at .* \(nobody is there\)"):
        rendezvous.open_rendezvous(Place("variables", 1, 2, 1, 2), 5.0)
    first, second = ClosingStore.waits
    assert second <= first - 0.1
    assert first <= 5.0


def test_store_has_the_requested_timeout(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    opened = [rendezvous.open_rendezvous(Place("variables", rank, 2, rank, 2), 10.0) for rank in range(2)]
    stores: list[Any] = [one.store.underlying_store for one in opened]
    assert {store.timeout for store in stores} == {timedelta(seconds=10)}


def test_init_is_refused_if_the_starter_has_ended(monkeypatch):
    ended_process = subprocess.Popen(["true"])
    ended_process.wait()
    monkeypatch.setenv("MESHFLASH_STARTER", str(ended_process.pid))
    with pytest.raises(
        LaunchError, match=f"process {ended_process.pid}, which started this rank, has ended; where MESHFLASH_"
    ):
        meshflash.init()
    monkeypatch.setenv("MESHFLASH_STARTER", str(os.getpid()))  # this process counts as its own starter
    with meshflash.init() as world_here:
        assert world_here.world_size == 1


def test_slurm_ranks_use_the_first_host_and_a_port_of_the_job(monkeypatch):
    addresses: list[tuple[str, int]] = []

    def record_address(place, address, port, *_):
        addresses.append((address, int(port)))
        return None, ""

    monkeypatch.setattr(rendezvous, "_at_master_address", record_address)
    monkeypatch.setattr(rendezvous, "Rendezvous", lambda *_: None)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[07-09]")
    for job in ("1.0", "1.0", "1.1"):
        rendezvous.open_rendezvous(Place("Slurm", 3, 6, 1, 2, 1, job), 1.0)
    assert [address for address, _ in addresses] == ["node07"] * 3
    assert addresses[0][1] == addresses[1][1] != addresses[2][1]
    assert all(port in rendezvous.SLURM_PORTS for _, port in addresses)
    monkeypatch.setenv("MASTER_PORT", "1234")
    rendezvous.open_rendezvous(Place("Slurm", 3, 6, 1, 2, 1, "1.0"), 1.0)
    assert addresses[-1] == ("node07", 1234)


def test_ranks_restarted_by_torchrun_ignore_keys_of_their_predecessors(monkeypatch):
    store = torch.distributed.HashStore()  # the store of the agent survives restarts
    monkeypatch.setattr(rendezvous.dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))

    def open_store(rank, timeout=10.0):
        return rendezvous.open_rendezvous(Place("torchrun", rank, 2, rank, 2), timeout).store

    for start in range(3):
        with ThreadPoolExecutor(2) as pool:  # rank 1 starts first, and finds keys of its predecessor
            later = pool.submit(open_store, 1)
            time.sleep(0.05)
            first, second = open_store(0), later.result()
        assert not first.check(["address"])
        first.set("address", str(start))
        assert second.get("address").decode() == str(start)
    with pytest.raises(LaunchError, match=r"rank 1 of 2 did not come within 0\.1 s"):
        open_store(0, 0.1)
    with pytest.raises(LaunchError, match=r"rank 1 of 2: rank 0 did not come within 0\.1 s"):
        open_store(1, 0.1)


@pytest.mark.parametrize("world", [2, 16, 64])
def test_rendezvous_under_torchrun_takes_a_handful_of_calls_of_the_store_a_rank(world, monkeypatch):
    shared = MemoryStore()
    stores = [CountingStore(shared) for _ in range(world)]
    monkeypatch.setattr(rendezvous.dist, "rendezvous", lambda _, rank, *__, **___: iter([(stores[rank], rank, world)]))
    monkeypatch.setattr(rendezvous, "guarded", lambda store, token: store)  # torch's PrefixStore wraps only its own
    monkeypatch.setattr(rendezvous.dist, "PrefixStore", lambda prefix, store: prefix)
    monkeypatch.setattr(rendezvous, "FIRST_POLL_SECONDS", 0.5)  # so that a busy machine looks no more often

    def open_store(rank):
        return rendezvous.open_rendezvous(Place("torchrun", rank, world, rank, world), 20.0).store

    for start in range(2):
        with ThreadPoolExecutor(world) as pool:
            # rank 0 comes last, in the second start after ranks that have found keys of their predecessors
            later = [pool.submit(open_store, rank) for rank in range(1, world)]
            time.sleep(0.2)
            first = open_store(0)
            prefixes = {first, *(each.result() for each in later)}
        assert len(prefixes) == 1
        others = [store.traffic for store in stores[1:]]
        assert max(traffic.num_calls for traffic in others) <= 16
        assert stores[0].traffic.num_calls <= 10 + start
        for store in stores:
            store.traffic.clear()
    assert shared.num_keys() == 4  # the digest of the token, the prefix, and the nonces of each start


def test_rendezvous_file_of_a_dead_job_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(rendezvous, "_name", lambda *_: "x")
    folder = tmp_path / f"meshflash-{os.getuid()}"
    folder.mkdir()
    (folder / "x.json").write_text('{"port": 1, "token": "old"}')
    with pytest.raises(LaunchError, match="rank 1 of 2: rank 0 did not come within"):
        rendezvous.open_rendezvous(Place("MPICH", 1, 2, 1, 2, None, "job"), 0.2)


def test_unusable_rendezvous_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"meshflash-{os.getuid()}").write_text("a file")
    with pytest.raises(
        LaunchError, match=r"ranks of one node find each other by a file, and .*: set TMPDIR, or set MASTER_ADDR"
    ):
        rendezvous.open_rendezvous(Place("MPICH", 1, 2, 1, 2, None, "job"), 0.2)


def test_hyperthreads_of_a_core_go_to_the_same_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    for core in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert cores.share_of(1, [tuple(range(8))] * 2) == (2, 6, 3, 7)


def test_sp_aurora_names_map_to_init(monkeypatch):
    assert not sp_aurora.detect_mpi_environment()
    this_rank = sp_aurora.setup_mpi_distributed()
    want = {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "device": this_rank["device"],
        "launcher": "single",
        "backend": None,
    }
    assert this_rank == want
    assert sp_aurora.init_distributed_backend()
    assert sp_aurora.get_device_for_rank() == this_rank["device"]
    sp_aurora.cleanup_distributed()
    monkeypatch.setenv("PMI_RANK", "1")
    assert sp_aurora.detect_mpi_environment()
    assert not sp_aurora.init_distributed_backend(timeout_seconds=1)  # the environment is incomplete


def test_checksum_job_in_a_single_process(tmp_path):
    result = CliRunner().invoke(app, ["checksum", "--batch", "4"])
    assert result.exit_code == 0, result.output
    assert "[Rank 0] local_B = 4, start_B = 0\n" in result.output
    found = next(line for line in result.output.splitlines() if line.startswith("[Rank 0] local_checksum"))
    assert float(found.split()[4].strip(",")) == pytest.approx(483.0731, rel=1e-4)


def test_checksum_job_over_local_ranks():
    job = run([*jobs.PYTHON, "-m", "meshflash", "checksum", "--nproc", "4"])
    assert job.code == 0, job.text
    sums = [float(line.split()[4].strip(",")) for line in job.text.splitlines() if "local_checksum" in line]
    assert sums == pytest.approx([483.0731, 679.7240, 876.3750, 1073.0259], rel=1e-4)
    total = next(line for line in job.text.splitlines() if line.startswith("Global checksum"))
    assert float(total.split(":")[1]) == pytest.approx(3112.1980, rel=1e-4)
    assert "World size = 4, CPU devices on node = 1\n" in job.text
    assert job.text.count("World size (num ranks / devices)   : 4\n") == 1
    assert "GPU" not in job.text
    assert job.text.count("PASS (relative error ") == 1


def test_wrong_checksum_fails_and_names_the_rank(monkeypatch):
    attend = checksum.flash_attention
    monkeypatch.setattr(checksum, "flash_attention", lambda *tensors: attend(*tensors) * 1.001)
    result = CliRunner().invoke(app, ["checksum", "--batch", "4"])
    assert result.exit_code == 1, result.output
    assert result.output.splitlines()[-1].startswith("FAIL: wrong on rank 0 (relative error 1.0e-03")


def test_checksum_job_divides_the_batch():
    assert [checksum.share(16, 4, rank) for rank in range(4)] == [(4, 0), (4, 4), (4, 8), (4, 12)]
    assert [checksum.share(2, 3, rank) for rank in range(3)] == [(1, 0), (1, 1), (0, 2)]


def test_launch_prefixes_output_lines_with_the_rank():
    script = Path(__file__).parents[2] / "examples" / "mpi_attention.py"
    job = run([*jobs.PYTHON, "-m", "meshflash", "launch", "-n", "2", str(script)])
    assert job.code == 0, job.text
    for rank in range(2):
        assert f"[rank {rank}] Rank {rank}/2 on device cpu\n" in job.text
        assert f"Rank {rank}: Output shape torch.Size([1, 512, 8, 64])" in job.text


def test_devices_are_selected_in_one_module():
    """Only kernels, which query their device, and the doctor, which lists all devices, may name CUDA elsewhere."""
    source = Path(meshflash.__file__).parent
    allowed = (source / "kernels", source / "runtime" / "devices.py", source / "runtime" / "doctor.py")
    for file in source.rglob("*.py"):
        if not any(file.is_relative_to(path) for path in allowed):
            found = [line for line in file.read_text().splitlines() if '"cuda' in line or ".cuda()" in line]
            assert not found, f"{file}: {found}"
