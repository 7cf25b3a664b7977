"""`meshflash doctor` on this machine, and on fake machines made of files, variables and programs."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from meshflash.kernels import registry
from meshflash.kernels.hopper import support
from meshflash.runtime import doctor, listen
from meshflash.runtime.doctor import Finding, examine
from runtime import jobs

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root folder of an empty machine: no devices, no launchers, no variables."""
    monkeypatch.setattr(doctor, "_ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    hidden = [name for maker in doctor._gpus() for name in maker.variables]
    for name in [*hidden, "OMP_NUM_THREADS", "SLURM_JOB_ID", "TRITON_INTERPRET", "CC"]:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(machine: Path, path: str, text: str = "") -> Path:
    """Write a file of the fake machine."""
    file = machine / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def program(machine: Path, name: str, body: str) -> None:
    """Add a program to the PATH of the fake machine."""
    put(machine, f"bin/{name}", f"#!/bin/sh\n{body}\n").chmod(0o755)


def fake_torch(monkeypatch: pytest.MonkeyPatch, build: str, *gpus: str, complaint: str = "") -> None:
    """Fake the build of torch, the GPUs that it sees, and its complaint about the driver."""
    monkeypatch.setattr(doctor, "_build", lambda: (build, "1.0"))
    monkeypatch.setattr(doctor, "_visible", lambda build: (list(gpus), complaint))


def found(topic: str) -> dict[str, Finding]:
    """Examine the machine; return the findings of a topic, by name."""
    return {finding.name: finding for finding in examine() if finding.topic == topic}


def test_every_topic_has_findings_and_every_problem_has_advice() -> None:
    findings = examine()
    assert list(dict.fromkeys(finding.topic for finding in findings)) == list(doctor._PROBES)
    for finding in findings:
        assert finding.status in ("ok", "note", "problem")
        assert finding.detail
        assert "\n" not in finding.detail + finding.advice
        assert finding.advice or finding.status != "problem"


def test_supported_versions_match_the_package_metadata() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    newest = (doctor.NEWEST_PYTHON[0], doctor.NEWEST_PYTHON[1] + 1)
    assert project["requires-python"] == f">={doctor._dotted(doctor.OLDEST_PYTHON)},<{doctor._dotted(newest)}"
    needs = [need.partition(";")[0] for need in project["dependencies"]]
    assert f"torch>={doctor._dotted(doctor.OLDEST_TORCH)}" in needs
    assert f"triton>={doctor._dotted(doctor.OLDEST_TRITON)}" in needs


def test_docs_and_kernels_state_the_supported_range() -> None:
    install = " ".join((PYPROJECT.parent / "docs" / "install.md").read_text().split())
    assert f"torch {doctor._dotted(doctor.OLDEST_TORCH)} to {doctor._dotted(doctor.NEWEST_TORCH)}" in install
    assert f"Triton {doctor._dotted(doctor.OLDEST_TRITON)} to {doctor._dotted(doctor.NEWEST_TRITON)}" in install
    for page in ("kernels.md", "gemm.md"):
        text = " ".join((PYPROJECT.parent / "docs" / page).read_text().split())
        assert f"Triton {doctor._dotted(doctor.OLDEST_TRITON)} to {doctor._dotted(doctor.NEWEST_TRITON)}" in text, page
    tested = [doctor._dotted(doctor.OLDEST_TRITON), doctor._dotted(doctor.NEWEST_TRITON)]
    assert [support.TRITON_VERSIONS[0], support.TRITON_VERSIONS[-1]] == tested


@pytest.mark.parametrize(("version", "status"), [("2.15.3+cu132", "ok"), ("2.16.0", "note"), ("3.0", "note")])
def test_versions_newer_than_tested_are_noted(version: str, status: str) -> None:
    found = doctor._newer("torch", version, doctor.NEWEST_TORCH)
    assert found.status == status
    assert version in found.detail


def test_failing_probe_becomes_a_finding_and_keeps_its_earlier_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> Iterator[Finding]:
        yield Finding("odd", "first", "ok", "fine")
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "_PROBES", {"odd": probe, "python": doctor._python})
    first, failed, *rest = examine()
    assert first.name == "first"
    assert failed == Finding("odd", "probe", "note", "could not be examined: OSError: no such thing")
    assert rest


def test_missing_torch_is_a_problem_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.setitem(sys.modules, name, None)
    torch = found("torch")["version"]
    assert torch.status == "problem"
    assert torch.advice == "pip install 'torch>=2.11'"
    assert [f.name for f in examine() if f.status == "problem"] == ["version"]


@pytest.mark.parametrize(("version", "status"), [("2.10.1", "problem"), ("2.11.0+cu130", "ok"), ("3.0", "note")])
def test_too_old_torch_is_a_problem(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr("torch.__version__", version)
    assert found("torch")["version"].status == status


def test_unsupported_python_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert found("python")["version"].advice == "use Python 3.11 to 3.13"


@pytest.mark.parametrize(("build", "status"), [("CPU", "note"), ("CUDA", "problem")])
def test_missing_triton_is_a_problem_only_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, machine: Path, build: str, status: str
) -> None:
    fake_torch(monkeypatch, build)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert found("triton")["version"].status == status


def test_failing_import_of_triton_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, "CUDA")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setitem(sys.modules, "triton", None)
    finding = found("triton")["version"]
    assert finding.status == "problem"
    assert "cannot be imported: ModuleNotFoundError" in finding.detail


def test_machine_without_gpus_has_no_problem(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    for build in ("CPU", "CUDA"):
        fake_torch(monkeypatch, build)
        assert {name: finding.status for name, finding in found("devices").items()} == {"GPU": "note"}


@pytest.mark.parametrize(
    ("path", "text", "name", "status"),
    [
        ("proc/driver/nvidia/gpus/0000:01:00.0/information", "", "NVIDIA GPUs", "problem"),
        ("dev/nvidia0", "", "NVIDIA GPUs", "problem"),
        ("dev/kfd", "", "AMD GPUs", "problem"),
        ("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "4711\n", "AMD GPUs", "problem"),
        ("sys/class/drm/renderD128/device/vendor", "0x8086\n", "Intel GPUs", "note"),
    ],
)
def test_gpu_with_a_cpu_build_of_torch_is_reported(
    monkeypatch: pytest.MonkeyPatch, machine: Path, path: str, text: str, name: str, status: str
) -> None:
    put(machine, path, text)
    fake_torch(monkeypatch, "CPU")
    finding = found("devices")[name]
    assert finding.status == status
    assert finding.detail == "1 on this machine, but torch is built for CPU"
    assert "install torch built for" in finding.advice


@pytest.mark.parametrize(
    ("build", "variable", "path"),
    [
        ("CUDA", "CUDA_VISIBLE_DEVICES", "dev/nvidia{}"),
        ("ROCm", "HIP_VISIBLE_DEVICES", "sys/class/kfd/kfd/topology/nodes/{}/gpu_id"),
        ("XPU", "ZE_AFFINITY_MASK", "sys/class/drm/renderD{}/device/vendor"),
    ],
)
def test_environment_variable_that_hides_gpus_is_named(
    monkeypatch: pytest.MonkeyPatch, machine: Path, build: str, variable: str, path: str
) -> None:
    for index in range(2):
        put(machine, path.format(index), "0x8086")
    monkeypatch.setenv(variable, "1")
    fake_torch(monkeypatch, build, "a GPU")
    (some,) = (finding for name, finding in found("devices").items() if name.endswith("GPUs"))
    assert some.status == "note"
    assert some.detail == f"torch sees 1 of the 2 on this machine: {variable}='1'"
    assert variable in some.advice
    fake_torch(monkeypatch, build)
    (none,) = (finding for name, finding in found("devices").items() if name.endswith("GPUs"))
    assert none.status == "problem"


def test_gpus_that_the_container_lacks_are_reported(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    for index in range(8):
        put(machine, f"proc/driver/nvidia/gpus/{index}/information")
    put(machine, "dev/nvidia3")
    put(machine, "dev/nvidiactl")
    fake_torch(monkeypatch, "CUDA", "a GPU")
    finding = found("devices")["NVIDIA GPUs"]
    assert finding.status == "note"
    assert finding.detail.endswith("this container or job was given 1")
    assert "--gpus all" in finding.advice


def test_broken_driver_is_a_problem(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    put(machine, "dev/nvidia0")
    fake_torch(monkeypatch, "CUDA", complaint="The NVIDIA driver on your system is too old")
    finding = found("devices")["NVIDIA GPUs"]
    assert finding.status == "problem"
    assert finding.detail.endswith("too old")


def test_visible_gpus_are_listed(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    put(machine, "dev/nvidia0")
    fake_torch(monkeypatch, "CUDA", "H200")
    assert found("devices") == {"GPU 0": Finding("devices", "GPU 0", "ok", "H200")}


def test_kernels_that_cannot_run_are_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str | None:
        raise RuntimeError("half installed")

    kernels = (
        SimpleNamespace(name="good", summary="does it all", missing=lambda: None),
        SimpleNamespace(name="absent", summary="", missing=lambda: "no GPU"),
        SimpleNamespace(name="broken", summary="", missing=broken),
    )
    monkeypatch.setattr(registry, "kernels", lambda: kernels)
    assert [(f.status, f.detail) for f in found("kernels").values()] == [
        ("ok", "does it all"),
        ("note", "cannot run here: no GPU"),
        ("note", "cannot run here: RuntimeError: half installed"),
    ]


def test_missing_backend_of_this_build_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    fake_torch(monkeypatch, "CPU")
    assert found("process groups")["gloo"].status == "ok"
    assert found("process groups")["nccl"].status == "note"
    fake_torch(monkeypatch, "CUDA")
    assert found("process groups")["nccl"].status == "problem"


def test_launchers_are_reported_with_their_version(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    assert {name: f.status for name, f in found("launchers").items() if name != "mpi4py"} == {
        "MPI": "note",
        "Slurm": "note",
    }
    program(machine, "mpirun", "echo; echo 'mpirun (Open MPI) 5.0.8'; echo more")
    program(machine, "srun", "exit 3")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_NNODES", "2")
    launchers = found("launchers")
    assert launchers["MPI"].detail == f"mpirun (Open MPI) 5.0.8 at {machine}/bin/mpirun"
    assert launchers["Slurm"].detail == (
        f"no version (exit code 3) at {machine}/bin/srun, in job 12, tasks: 8, nodes: 2"
    )


def test_doctor_does_not_import_mpi4py(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    put(machine, "mpi4py/__init__.py", "raise SystemExit('imported')")
    put(machine, "mpi4py-4.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.1\n")
    monkeypatch.syspath_prepend(machine)
    assert found("launchers")["mpi4py"] == Finding("launchers", "mpi4py", "ok", "4.1")


@pytest.mark.parametrize(
    ("size", "free", "advice"),
    [(64 * 2**20, 64 * 2**20, "--ipc=host"), (2**34, 2**20, "remove"), (2**34, 2**33, "")],
)
def test_small_shared_memory_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, machine: Path, size: int, free: int, advice: str
) -> None:
    (machine / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(total=size, free=free))
    finding = found("limits")["/dev/shm"]
    assert finding.status == ("problem" if advice else "ok")
    assert advice in finding.advice


@pytest.mark.parametrize(
    ("files", "locked", "infiniband", "statuses"),
    [
        (100, 65536, True, ("problem", "problem")),
        (1024, 65536, False, ("note", "ok")),
        (65536, -1, True, ("ok", "ok")),
        (-1, -1, False, ("ok", "ok")),
    ],
)
def test_low_resource_limits_are_reported(
    monkeypatch: pytest.MonkeyPatch,
    machine: Path,
    files: int,
    locked: int,
    infiniband: bool,
    statuses: tuple[str, str],
) -> None:
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: locked}
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits[which], -1))
    if infiniband:
        (machine / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    limits_found = found("limits")
    assert (limits_found["open files"].status, limits_found["locked memory"].status) == statuses


@pytest.mark.parametrize(
    ("threads", "omp_num_threads", "status"), [(4, None, "ok"), (2, None, "ok"), (2, "2", "note"), (8, None, "problem")]
)
def test_more_threads_than_cores_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, machine: Path, threads: int, omp_num_threads: str | None, status: str
) -> None:
    monkeypatch.setattr(doctor, "_cores", lambda: 4)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    if omp_num_threads:
        monkeypatch.setenv("OMP_NUM_THREADS", omp_num_threads)
    assert found("threads")["torch"].status == status


def test_container_limits_of_cores_and_memory_are_respected(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    put(machine, "proc/meminfo", "MemTotal:       1048576 kB\nMemAvailable:    524288 kB\n")
    assert (doctor._cores(), doctor._memory()) == (64, (2**30, 2**29))
    put(machine, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    put(machine, "sys/fs/cgroup/memory.max", f"{2**28}\n")
    assert (doctor._cores(), doctor._memory()) == (2, (2**28, 2**28))
    put(machine, "sys/fs/cgroup/cpu.max", "max 100000\n")
    put(machine, "sys/fs/cgroup/memory.max", "max\n")
    assert (doctor._cores(), doctor._memory()) == (64, (2**30, 2**29))


def test_available_transports_are_reported(monkeypatch: pytest.MonkeyPatch, machine: Path) -> None:
    fake_torch(monkeypatch, "CPU")
    findings = found("transports")
    backends = ", ".join(name for name in ("nccl", "gloo") if getattr(dist, f"is_{name}_available")())
    assert (findings["process_group"].status, findings["process_group"].detail) == ("ok", f"by {backends}")
    assert "none is visible here" in findings["symmetric, host_staged"].detail
    fake_torch(monkeypatch, "CUDA", "NVIDIA H200")
    findings = found("transports")
    assert [findings[name].status for name in ("symmetric", "host_staged", "MPS")] == ["ok", "ok", "note"]
    program(machine, "nvidia-cuda-mps-control", "true")
    assert found("transports")["MPS"].status == "ok"
    fake_torch(monkeypatch, "XPU", "Intel Max 1550")
    findings = found("transports")
    assert findings["symmetric"].detail == "not in this XPU build of torch"
    assert "MPS" not in findings


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove the variables of launchers; a test sets those of its own launcher."""
    for name in list(os.environ):
        if name.startswith(jobs.RANK_VARIABLES) or name == "NCCL_SOCKET_IFNAME":
            monkeypatch.delenv(name)
    return monkeypatch


def test_single_rank_opens_no_port(environment: pytest.MonkeyPatch) -> None:
    assert {name: finding.detail[:4] for name, finding in found("listens").items() if name != "token"} == {
        "store": "none",
        "liveness": "none",
        "gloo": "none",
        "nccl": "none",
    }


def test_listening_addresses_of_ranks_are_reported(environment: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"}
    for name, value in variables.items():
        environment.setenv(name, value)
    findings = found("listens")
    assert findings["store"].detail == "127.0.0.1:12345"
    assert findings["gloo"].detail == listen.LOOPBACK
    assert findings["token"].status == "note"
    assert findings["token"].advice.startswith("export MESHFLASH_TOKEN=")
    environment.setenv("MESHFLASH_TOKEN", "0123456789abcdef")
    environment.setenv("MASTER_ADDR", "203.0.113.7")
    environment.setenv("GLOO_SOCKET_IFNAME", "eth7")
    findings = found("listens")
    assert findings["token"].detail == "MESHFLASH_TOKEN is set"
    assert findings["store"].status == "note"
    assert findings["store"].detail.startswith("all interfaces, port 12345: 203.0.113.7 is no address of this host")
    assert findings["gloo"].detail == "eth7, as GLOO_SOCKET_IFNAME says"
    environment.setenv("TORCHELASTIC_RUN_ID", "run")
    assert found("listens")["store"].detail.startswith("torchrun's, 203.0.113.7:12345: on all interfaces")


def test_ranks_of_a_single_node_listen_on_loopback(environment: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}.items():
        environment.setenv(f"OMPI_COMM_WORLD_{name}", value)
    findings = found("listens")
    assert findings["store"].detail == "127.0.0.1, a port that the system chooses"
    assert (findings["gloo"].detail, findings["token"].status) == (listen.LOOPBACK, "ok")
