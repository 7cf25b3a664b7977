"""`init` and what it chooses: devices, backends, cores, logs; and the names of others for it."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import distributed as _distributed
from typer.testing import CliRunner

import meshflash
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
def nobody(monkeypatch):
    """No launcher started us, and nothing is begun or left."""
    for name in list(os.environ):
        if name.startswith(jobs.ABOUT):
            monkeypatch.delenv(name)
    yield
    meshflash.shutdown()


def test_alone_there_is_no_group_and_none_is_needed():
    with meshflash.init() as here:
        assert meshflash.init() is here
        assert (here.rank, here.world_size, here.local_rank, here.local_world_size, here.node) == (0, 1, 0, 1, 0)
        assert (here.launcher, here.backend, here.device.type) == ("single", None, devices.kind_here())
        assert not dist.is_initialized()
        assert world._world is here
        assert meshflash.init(backend="gloo") is here  # there is no group to have another backend
    assert world._world is None
    meshflash.shutdown()  # again


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan")])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match="expected seconds > 0"):
        meshflash.init(timeout=timeout)


def test_a_group_that_was_there_before_is_taken_and_stays(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        here = meshflash.init()
        assert (here.rank, here.world_size, here.backend) == (0, 1, "gloo")
        meshflash.shutdown()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def adopted(rank, world, group):
    here = meshflash.init()
    assert meshflash.init() is here
    return here.rank, here.world_size


def test_a_group_that_was_made_after_another_ended_is_taken(pool):
    for world_size in (2, 3, 2):
        assert pool.run(world_size, adopted) == [(rank, world_size) for rank in range(world_size)]


def made_late(rank, world_size, group, port, file):
    """Rank 1 takes long to have a group that rank 0 has."""
    dist.destroy_process_group()
    make = dist.init_process_group

    def late(*arguments, **more):
        make(*arguments, **more)
        if rank == 1:
            time.sleep(0.5)
            file.touch()

    world.dist.init_process_group = late
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        with meshflash.init():
            return file.exists()
    finally:
        world.dist.init_process_group = make
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name)


def test_nobody_begins_before_all_have_the_group(pool, tmp_path):
    """A rank that ended at once would close connections that others are about to make."""
    assert pool.run(2, made_late, free_port(), tmp_path / "made") == [True, True]


def ranks(kind, backends, *places):
    return [RankInfo(host, kind, device, backends) for host, device in places]


@pytest.mark.parametrize(
    ("said", "backend", "reason"),
    [
        (ranks("cpu", ("gloo",), ("a", ""), ("b", "")), "gloo", ""),
        (ranks("cuda", CUDA, ("a", "1"), ("a", "2")), "cpu:gloo,cuda:nccl", ""),
        (ranks("cuda", CUDA, ("a", "1"), ("b", "1")), "cpu:gloo,cuda:nccl", ""),
        (ranks("cuda", CUDA, ("a", "1"), ("a", "1")), "gloo", "ranks share a device, which nccl refuses"),
        (ranks("cuda", ("gloo",), ("a", "1"), ("a", "2")), "gloo", "nccl are missing on some rank"),
        (ranks("cuda", CUDA, ("a", "1")) + ranks("cuda", ("gloo",), ("a", "2")), "gloo", "missing on some rank"),
        (ranks("xpu", BOTH, ("a", "1"), ("a", "2")), "cpu:gloo,xpu:xccl", ""),
        (ranks("xpu", ("ccl", "gloo"), ("a", "1"), ("a", "2")), "ccl", "xccl is not in this build of torch"),
        (ranks("xpu", ("gloo",), ("a", "1"), ("a", "2")), "gloo", "xccl and ccl are missing"),
    ],
)
def test_the_backend_of_all_ranks(said, backend, reason):
    chosen, why = choose_backend(said)
    assert chosen == backend
    assert reason in why
    assert bool(reason) == bool(why)


def test_a_backend_may_be_forced_where_all_have_it():
    said = ranks("cuda", CUDA, ("a", "1"), ("a", "2"))
    assert choose_backend(said, "gloo") == ("gloo", "")
    assert choose_backend(said, "cpu:gloo,cuda:nccl") == ("cpu:gloo,cuda:nccl", "")
    with pytest.raises(ValueError, match=r"backend='xccl': rank 0, 1 has no xccl; it has nccl, gloo"):
        choose_backend(said, "xccl")


def test_ranks_of_different_kinds_are_refused():
    said = ranks("cuda", CUDA, ("a", "1")) + ranks("cpu", ("gloo",), ("a", ""))
    with pytest.raises(ValueError, match=r"kinds of devices \(cpu: rank 1; cuda: rank 0\).*CUDA_VISIBLE_DEVICES"):
        choose_backend(said)


def test_devices_are_shared_by_more_ranks(monkeypatch):
    monkeypatch.setattr(devices, "count", lambda kind: 2 if kind == "xpu" else 0)
    assert devices.kind_here() == "xpu"
    assert [devices.device_of(rank).index for rank in range(4)] == [0, 1, 0, 1]


def test_peak_memory_of_a_process_grows():
    before = meshflash.peak_memory("cpu")
    held = torch.ones(2**24 + before // 4)
    assert meshflash.peak_memory(torch.device("cpu")) >= held.nbytes


def test_cores_near_a_device_and_near_a_rank(tmp_path, monkeypatch):
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


def test_shares_of_cores():
    whole = tuple(range(8))
    assert [cores.share_of(rank, [whole] * 3) for rank in range(3)] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    near = [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2
    assert [cores.share_of(rank, [whole] * 4, near) for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [cores.share_of(rank, [(0, 1)] * 3) for rank in range(3)] == [(0,), (0,), (1,)]
    assert cores.share_of(0, [(0,), (1,)]) == (0,)


def test_cores_are_taken_with_as_many_threads(monkeypatch):
    taken = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(cores), raising=False)
    monkeypatch.setattr(cores, "cores_here", lambda: (0, 1, 2, 3))
    before = torch.get_num_threads()
    try:
        cores.take((1, 2))
        assert (taken, torch.get_num_threads()) == ([{1, 2}], 2)
        monkeypatch.setenv("MESHFLASH_BIND", "0")
        monkeypatch.setenv("OMP_NUM_THREADS", "7")
        cores.take((1, 2, 3))
        assert (taken, torch.get_num_threads()) == ([{1, 2}], 2)
    finally:
        torch.set_num_threads(before)


def test_logs_begin_with_the_rank(monkeypatch, capsys):
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


def test_where_rank_0_is_must_be_known(monkeypatch):
    many = Place("MPI", 1, 4, 0, 2)
    with pytest.raises(LaunchError, match="rank 1 of 4, started by MPI, does not know where rank 0 is: set"):
        rendezvous.open_rendezvous(many, 1.0)
    monkeypatch.setattr(rendezvous, "starter", lambda: "")
    with pytest.raises(LaunchError, match="cannot tell its job from others on this machine: set MASTER_ADDR="):
        rendezvous.open_rendezvous(Place("variables", 1, 2, 1, 2), 1.0)
    monkeypatch.setenv("MASTER_ADDR", "here")
    for port in ("http", "70000", "0", "-1", "²"):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(LaunchError, match=f"MASTER_PORT='{port}': expected a number from 1 to 65535"):
            rendezvous.open_rendezvous(many, 1.0)


def test_the_whole_timeout_is_told_though_a_part_of_it_is_spent(monkeypatch):
    class Closing:
        """The store of an earlier meeting: there once, and never opened for this one."""

        waits: ClassVar[list[float]] = []

        def __init__(self, *_, timeout, **__):
            self.waits.append(timeout.total_seconds())
            if len(self.waits) > 1:
                raise RuntimeError("nobody is there")

        def set_timeout(self, _):
            return None

        def wait(self, *_):
            raise RuntimeError("not opened")

    monkeypatch.setattr(rendezvous.dist, "TCPStore", Closing)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(LaunchError, match=r"rank 1 of 2 found no rank 0 within 5 s at .* \(nobody is there\)"):
        rendezvous.open_rendezvous(Place("variables", 1, 2, 1, 2), 5.0)
    first, second = Closing.waits
    assert second <= first - 0.1
    assert first <= 5.0


def test_a_store_waits_as_long_as_was_asked_for(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    met = [rendezvous.open_rendezvous(Place("variables", rank, 2, rank, 2), 10.0) for rank in range(2)]
    assert {one.store.underlying_store.timeout for one in met} == {timedelta(seconds=10)}


def test_a_rank_whose_starter_has_ended_does_not_begin(monkeypatch):
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setenv("MESHFLASH_STARTER", str(ended.pid))
    with pytest.raises(LaunchError, match=f"process {ended.pid}, which started this rank, has ended; where MESHFLASH_"):
        meshflash.init()
    monkeypatch.setenv("MESHFLASH_STARTER", str(os.getpid()))  # of a rank that started us
    with meshflash.init() as world_here:
        assert world_here.world_size == 1


def test_slurm_nodes_meet_at_the_first_host_on_a_port_of_the_job(monkeypatch):
    asked: list[tuple[str, int]] = []

    def given(place, address, port, *_):
        asked.append((address, int(port)))
        return None, ""

    monkeypatch.setattr(rendezvous, "_at_master_address", given)
    monkeypatch.setattr(rendezvous, "Rendezvous", lambda *_: None)
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[07-09]")
    for job in ("1.0", "1.0", "1.1"):
        rendezvous.open_rendezvous(Place("Slurm", 3, 6, 1, 2, 1, job), 1.0)
    assert [address for address, _ in asked] == ["node07"] * 3
    assert asked[0][1] == asked[1][1] != asked[2][1]
    assert all(port in rendezvous.SLURM_PORTS for _, port in asked)
    monkeypatch.setenv("MASTER_PORT", "1234")
    rendezvous.open_rendezvous(Place("Slurm", 3, 6, 1, 2, 1, "1.0"), 1.0)
    assert asked[-1] == ("node07", 1234)


def test_ranks_that_torchrun_starts_again_do_not_hear_those_before(monkeypatch):
    store = torch.distributed.HashStore()  # of the agent: it stays
    monkeypatch.setattr(rendezvous.dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))

    def met(rank, timeout=10.0):
        return rendezvous.open_rendezvous(Place("torchrun", rank, 2, rank, 2), timeout).store

    for start in range(3):
        with ThreadPoolExecutor(2) as pool:  # the second rank comes first, and finds what others said
            later = pool.submit(met, 1)
            time.sleep(0.05)
            first, second = met(0), later.result()
        assert not first.check(["address"])
        first.set("address", str(start))
        assert second.get("address").decode() == str(start)
    with pytest.raises(LaunchError, match=r"rank 1 of 2 did not come within 0\.1 s"):
        met(0, 0.1)
    with pytest.raises(LaunchError, match=r"rank 1 of 2: rank 0 did not come within 0\.1 s"):
        met(1, 0.1)


def test_a_file_that_a_dead_job_left_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(rendezvous, "_name", lambda *_: "x")
    folder = tmp_path / f"meshflash-{os.getuid()}"
    folder.mkdir()
    (folder / "x.json").write_text('{"port": 1, "token": "old"}')
    with pytest.raises(LaunchError, match="rank 1 of 2: rank 0 did not come within"):
        rendezvous.open_rendezvous(Place("MPICH", 1, 2, 1, 2, None, "job"), 0.2)


def test_a_folder_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"meshflash-{os.getuid()}").write_text("a file")
    with pytest.raises(LaunchError, match=r"ranks of a node meet by a file, and .*: set TMPDIR, or set MASTER_ADDR"):
        rendezvous.open_rendezvous(Place("MPICH", 1, 2, 1, 2, None, "job"), 0.2)


def test_threads_of_one_core_stay_together(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    for core in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert cores.share_of(1, [tuple(range(8))] * 2) == (2, 6, 3, 7)


def test_the_names_of_sp_aurora(monkeypatch):
    assert not sp_aurora.detect_mpi_environment()
    here = sp_aurora.setup_mpi_distributed()
    want = {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "device": here["device"],
        "launcher": "single",
        "backend": None,
    }
    assert here == want
    assert sp_aurora.init_distributed_backend()
    assert sp_aurora.get_device_for_rank() == here["device"]
    sp_aurora.cleanup_distributed()
    monkeypatch.setenv("PMI_RANK", "1")
    assert sp_aurora.detect_mpi_environment()
    assert not sp_aurora.init_distributed_backend(timeout_seconds=1)  # half an environment


def test_the_checksum_job_alone(tmp_path):
    result = CliRunner().invoke(app, ["checksum", "--batch", "4"])
    assert result.exit_code == 0, result.output
    assert "[Rank 0] local_B = 4, start_B = 0\n" in result.output
    found = next(line for line in result.output.splitlines() if line.startswith("[Rank 0] local_checksum"))
    assert float(found.split()[4].strip(",")) == pytest.approx(483.0731, rel=1e-4)


def test_the_checksum_job_over_ranks_of_this_machine():
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


def test_a_wrong_checksum_fails_and_names_the_rank(monkeypatch):
    attend = checksum.flash_attention
    monkeypatch.setattr(checksum, "flash_attention", lambda *tensors: attend(*tensors) * 1.001)
    result = CliRunner().invoke(app, ["checksum", "--batch", "4"])
    assert result.exit_code == 1, result.output
    assert result.output.splitlines()[-1].startswith("FAIL: wrong on rank 0 (relative error 1.0e-03")


def test_shares_of_the_checksum_job():
    assert [checksum.share(16, 4, rank) for rank in range(4)] == [(4, 0), (4, 4), (4, 8), (4, 12)]
    assert [checksum.share(2, 3, rank) for rank in range(3)] == [(1, 0), (1, 1), (0, 2)]


def test_launch_starts_a_script_with_lines_that_begin_with_the_rank():
    script = Path(__file__).parents[2] / "examples" / "mpi_attention.py"
    job = run([*jobs.PYTHON, "-m", "meshflash", "launch", "-n", "2", str(script)])
    assert job.code == 0, job.text
    for rank in range(2):
        assert f"[rank {rank}] Rank {rank}/2 on device cpu\n" in job.text
        assert f"Rank {rank}: Output shape torch.Size([1, 512, 8, 64])" in job.text


def test_devices_are_selected_in_one_room():
    """Other rooms take the device that they are given; kernels ask what theirs can do, and the doctor looks at all."""
    source = Path(meshflash.__file__).parent
    rooms = (source / "kernels", source / "runtime" / "devices.py", source / "runtime" / "doctor.py")
    for file in source.rglob("*.py"):
        if not any(file.is_relative_to(room) for room in rooms):
            found = [line for line in file.read_text().splitlines() if '"cuda' in line or ".cuda()" in line]
            assert not found, f"{file}: {found}"
