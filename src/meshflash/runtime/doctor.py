"""Examine this machine: versions, devices, kernels, launchers, limits, as a list of findings.

Probes are read-only: they install, change and start nothing. A probe that fails becomes a finding itself, so that an
examination always ends. The command line decides how findings are shown.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from meshflash import __version__

Status = Literal["ok", "note", "problem"]

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
#: The supported range: pyproject.toml requires the oldest, and `make test-torch` runs the tests with any version.
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)

GIB = 2**30

#: The root of /proc, /sys and /dev; tests put a made-up machine here.
_ROOT = Path("/")


@dataclass(frozen=True)
class Finding:
    """One fact about this machine. A "note" is worth knowing; a "problem" comes with advice to follow."""

    topic: str
    name: str
    status: Status
    detail: str
    advice: str = ""


def examine() -> list[Finding]:
    """Return all findings about this machine, topic by topic.

    >>> examine()[0].name
    'meshflash'
    """
    findings: list[Finding] = []
    for topic, probe in _PROBES.items():
        try:
            for finding in probe():  # one by one, to keep the findings before a failure
                findings.append(finding)
        except Exception as error:
            findings.append(Finding(topic, "probe", "note", f"could not be examined: {_describe(error)}"))
    return findings


def _python() -> Iterator[Finding]:
    yield Finding("python", "meshflash", "ok", __version__)
    detail = f"{platform.python_version()} at {sys.executable}"
    if OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        yield Finding("python", "version", "ok", detail)
    else:
        advice = f"use Python {_dotted(OLDEST_PYTHON)} to {_dotted(NEWEST_PYTHON)}"
        yield Finding("python", "version", "problem", detail, advice)


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "system", "ok", platform.platform())
    model = re.search(r"^model name\s*:\s*(.+)$", _read("proc/cpuinfo"), re.MULTILINE)
    name = model[1] if model else platform.processor() or platform.machine()
    yield Finding("machine", "cores", "ok", f"{_cores()} of {os.cpu_count()} usable, {name}")
    total, free = _memory()
    yield Finding("machine", "memory", "ok", f"{_size(free)} free of {_size(total)}")


def _torch() -> Iterator[Finding]:
    wanted = f"'torch>={_dotted(OLDEST_TORCH)}'"
    try:
        import torch
    except Exception as error:
        detail = f"cannot be imported: {_describe(error)}"
        yield Finding("torch", "version", "problem", detail, f"pip install {wanted}")
        return
    version = str(torch.__version__)
    if _numbers(version) < OLDEST_TORCH:
        yield Finding("torch", "version", "problem", version, f"pip install --upgrade {wanted}")
    else:
        yield _newer("torch", version, NEWEST_TORCH)
    build, number = _build()
    yield Finding("torch", "build", "ok", f"{build} {number}".strip())


def _newer(topic: str, version: str, newest: tuple[int, int]) -> Finding:
    """Return a version that is not too old: a note if it is newer than the newest one that was tested."""
    if _numbers(version)[:2] <= newest:
        return Finding(topic, "version", "ok", version)
    return Finding(topic, "version", "note", f"{version}, newer than {_dotted(newest)}, the newest that was tested")


def _triton() -> Iterator[Finding]:
    build, _ = _build()
    advice = f"pip install 'triton>={_dotted(OLDEST_TRITON)}'"
    # Without a GPU only the CPU kernels run, and they do not need Triton.
    bad: Status = "note" if build == "CPU" else "problem"
    if importlib.util.find_spec("triton") is None:
        if sys.platform == "linux":
            yield Finding("triton", "version", bad, "not installed", advice)
        else:
            yield Finding("triton", "version", "note", f"not made for {sys.platform}")
        return
    try:
        import triton
    except Exception as error:
        yield Finding("triton", "version", bad, f"cannot be imported: {_describe(error)}", advice)
        return
    version = str(triton.__version__)
    if _numbers(version) < OLDEST_TRITON:
        yield Finding("triton", "version", bad, version, advice)
    else:
        yield _newer("triton", version, NEWEST_TRITON)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        detail = "TRITON_INTERPRET is set: kernels run in Python, slowly"
        yield Finding("triton", "interpreter", "note", detail, "unset TRITON_INTERPRET unless you debug a kernel")
    compilers = (os.environ.get("CC", ""), "gcc", "clang")
    compiler = next((path for name in compilers if name and (path := shutil.which(name))), None)
    if compiler:
        yield Finding("triton", "C compiler", "ok", compiler)
    else:
        advice = "install gcc or clang, or set CC: Triton builds the host's side of a kernel with it"
        yield Finding("triton", "C compiler", bad, "none found", advice)


@dataclass(frozen=True)
class _Vendor:
    """A GPU vendor: the build of torch for it, the variables that hide GPUs, and how a container gets them."""

    name: str
    build: str
    variables: tuple[str, ...]
    container: str


_NVIDIA = _Vendor("NVIDIA", "CUDA", ("CUDA_VISIBLE_DEVICES",), "docker run --gpus all, apptainer exec --nv")
_AMD = _Vendor(
    "AMD",
    "ROCm",
    ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "docker run --device /dev/kfd --device /dev/dri, apptainer exec --rocm",
)
_INTEL = _Vendor("Intel", "XPU", ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"), "docker run --device /dev/dri")


def _devices() -> Iterator[Finding]:
    build, _ = _build()
    names, complaint = _visible(build)
    for index, name in enumerate(names):
        yield Finding("devices", f"GPU {index}", "ok", name)
    if not names:
        yield Finding("devices", "GPU", "note", "torch sees none: attention runs on the CPU")
    for vendor, (there, given) in _gpus().items():
        topic = f"{vendor.name} GPUs"
        if vendor.build == build and len(names) < there:
            yield _unseen(vendor, there, given, len(names), complaint)
        elif vendor.build != build and there:
            # It may be intended if torch drives other GPUs, or if these are likely the graphics of a laptop.
            status: Status = "note" if build != "CPU" or vendor is _INTEL else "problem"
            detail = f"{there} on this machine, but torch is built for {build}"
            advice = f"install torch built for {vendor.build}: pytorch.org gives the command"
            yield Finding("devices", topic, status, detail, advice)


def _unseen(vendor: _Vendor, there: int, given: int, seen: int, complaint: str) -> Finding:
    """Return why torch sees fewer GPUs of this vendor than the machine has."""
    status: Status = "note" if seen else "problem"
    detail = f"torch sees {seen} of the {there} on this machine: "
    variable = next((name for name in vendor.variables if name in os.environ), None)
    if variable:
        detail += f"{variable}={os.environ[variable]!r}"
        advice = f"unset {variable} to see every GPU that was given to this process"
    elif given <= seen:
        detail += f"this container or job was given {given}"
        advice = f"ask for more where it is started: {vendor.container}"
    else:
        status = "problem"
        detail += complaint or "the driver does not answer"
        advice = f"check that the driver runs and is new enough for torch's {vendor.build} build"
    return Finding("devices", f"{vendor.name} GPUs", status, detail, advice)


def _kernels() -> Iterator[Finding]:
    import torch  # noqa: F401 -- if it is missing, the topic "torch" says so

    try:
        from meshflash.kernels import registry
    except Exception as error:
        yield Finding("kernels", "registry", "problem", _describe(error), "reinstall meshflash")
        return
    for kernel in registry.kernels():
        try:
            missing = kernel.missing()
        except Exception as error:
            missing = _describe(error)
        if missing:
            yield Finding("kernels", kernel.name, "note", f"cannot run here: {missing}")
        elif kernel.name == "hopper" and (off := _hopper_off()):
            yield Finding("kernels", kernel.name, off.status, off.detail, off.advice)
        else:
            yield Finding("kernels", kernel.name, "ok", kernel.summary)
    yield from _rates()


def _hopper_off() -> Finding | None:
    """Return why the Hopper kernels are off on a Hopper GPU here, or that there is none; None if they are on."""
    import torch

    from meshflash.kernels.hopper.support import kernels_off
    from meshflash.runtime.devices import device_of

    if not torch.cuda.is_available():
        return Finding("kernels", "hopper", "note", "off: there is no Hopper GPU")
    found = {n: kernels_off(device_of(n)) for n in range(torch.cuda.device_count())}
    for n, off in found.items():
        if off and off.fixable:
            return Finding("kernels", "hopper", "problem", f"off on GPU {n}: {off.reason}", off.remedy)
    if None in found.values():
        return None
    return Finding("kernels", "hopper", "note", "off: no GPU here is a Hopper GPU")


def _rates() -> Iterator[Finding]:
    """Yield which measured rates kernel="auto" uses on each kind of GPU here."""
    import torch

    from meshflash.kernels import rates
    from meshflash.runtime.devices import device_of

    build, _ = _build()
    if build not in ("CUDA", "ROCm") or not torch.cuda.is_available():
        return
    devices = [device_of(n) for n in range(torch.cuda.device_count())]
    for (name, _), device in {rates.identity(device): device for device in devices}.items():
        try:
            known = rates.known(device)
        except ValueError as error:
            yield Finding("kernels", "rates", "problem", _describe(error), "meshflash calibrate")
            continue
        if known is None:
            detail = f"none for {name}: kernels are taken in a fixed order"
            yield Finding("kernels", "rates", "note", detail, "meshflash calibrate")
            continue
        advice = "" if known.rates.device == name else "meshflash calibrate"
        yield Finding("kernels", "rates", "note" if advice else "ok", f"{name}: {known.source}", advice)


def _process_groups() -> Iterator[Finding]:
    import torch.distributed as dist

    topic = "process groups"
    if not dist.is_available():
        advice = "install a build of torch that has it: pytorch.org gives the command"
        yield Finding(topic, "torch.distributed", "problem", "not in this build of torch", advice)
        return
    build, _ = _build()
    for backend, purpose, builds in (
        ("gloo", "CPU tensors, and control messages between ranks", ("CPU", "CUDA", "ROCm", "XPU")),
        ("nccl", "NVIDIA and AMD GPUs", ("CUDA", "ROCm")),
        ("xccl", "Intel GPUs", ("XPU",)),
        ("mpi", "torch compiled against an MPI; mpiexec works without it", ()),
    ):
        if getattr(dist, f"is_{backend}_available", bool)():
            yield Finding(topic, backend, "ok", purpose)
        elif build in builds:
            advice = f"install a build of torch with {backend}: pytorch.org gives the command"
            yield Finding(topic, backend, "problem", f"not in this {build} build; for {purpose}", advice)
        else:
            yield Finding(topic, backend, "note", f"not in this {build} build; for {purpose}")


def _transports() -> Iterator[Finding]:
    """Yield which transports work for this machine's devices; a call's choice depends on the process group, too."""
    import torch.distributed as dist

    from meshflash.runtime.mps import missing

    topic, (build, _) = "transports", _build()
    backends = [name for name in ("nccl", "xccl", "gloo") if getattr(dist, f"is_{name}_available", bool)()]
    yield Finding(topic, "process_group", "ok" if backends else "note", f"by {', '.join(backends) or 'no backend'}")
    devices, _ = _visible(build)
    if not devices:
        yield Finding(topic, "symmetric, host_staged", "note", "for GPUs, and none is visible here")
        return
    symmetric = build == "CUDA" and importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
    detail = "ranks of this host pull from each other's memory" if symmetric else f"not in this {build} build of torch"
    yield Finding(topic, "symmetric", "ok" if symmetric else "note", detail)
    staged = "gloo" in backends
    detail = "through pinned memory, by gloo" if staged else "needs gloo, which is not in this build of torch"
    yield Finding(topic, "host_staged", "ok" if staged else "note", detail)
    if build == "CUDA":
        reason = missing()
        detail = reason or "ranks that share a GPU can run at once: nvidia-cuda-mps-control is here"
        yield Finding(topic, "MPS", "note" if reason else "ok", detail)


def _launchers() -> Iterator[Finding]:
    mpi = shutil.which("mpiexec") or shutil.which("mpirun")
    if mpi:
        yield Finding("launchers", "MPI", "ok", f"{_version(mpi)} at {mpi}")
    else:
        yield Finding("launchers", "MPI", "note", "no mpiexec or mpirun on PATH; torchrun needs neither")
    # Do not import mpi4py.MPI: that would start MPI in this process.
    if importlib.util.find_spec("mpi4py"):
        yield Finding("launchers", "mpi4py", "ok", metadata.version("mpi4py"))
    else:
        advice = "pip install mpi4py" if mpi else ""
        yield Finding("launchers", "mpi4py", "note", "not installed", advice)
    srun, job = shutil.which("srun"), os.environ.get("SLURM_JOB_ID")
    tasks, nodes = os.environ.get("SLURM_NTASKS", "?"), os.environ.get("SLURM_NNODES", "?")
    place = f"in job {job}, tasks: {tasks}, nodes: {nodes}" if job else "not in a job"
    if srun:
        yield Finding("launchers", "Slurm", "ok", f"{_version(srun)} at {srun}, {place}")
    elif job:
        advice = "call srun outside the container, or start ranks with torchrun"
        yield Finding("launchers", "Slurm", "note", f"{place}, but no srun on PATH", advice)
    else:
        yield Finding("launchers", "Slurm", "note", "no srun on PATH")


def _listens() -> Iterator[Finding]:
    """Yield what would listen where if this process called init: a single process opens no port."""
    from meshflash.runtime.guard import TOKEN, given_token
    from meshflash.runtime.launchers import LaunchError, detect
    from meshflash.runtime.listen import plan

    try:
        place = detect()
        for name, where in plan(place):
            yield Finding("listens", name, "note" if "all interfaces" in where else "ok", where)
        token = given_token()
    except LaunchError as error:
        yield Finding("listens", "launcher", "problem", _describe(error), "set what it names, or unset the variables")
        return
    if place.world_size == 1:
        detail = "meshflash launch and --nproc make one, and keep all of these on the loopback"
        yield Finding("listens", "token", "ok", f"{'set; ' if token else ''}{detail}")
    elif token or (place.one_node and not os.environ.get("MASTER_ADDR")):
        yield Finding(
            "listens", "token", "ok", f"{TOKEN} is set" if token else "made by rank 0, in a file of this user's"
        )
    else:
        advice = f"export {TOKEN}=$(python -c 'import secrets; print(secrets.token_hex(16))') for all ranks of a job"
        yield Finding("listens", "token", "note", "none: any process that reaches the store may join the job", advice)


def _limits() -> Iterator[Finding]:
    shm = _ROOT / "dev/shm"
    if shm.is_dir():
        space = shutil.disk_usage(shm)
        yield _shared_memory(space.total, space.free)
    import resource  # not on Windows: there the probe ends here

    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY:
        yield Finding("limits", "locked memory", "ok", "unlimited")
    elif any((_ROOT / "sys/class/infiniband").glob("*")):
        advice = "ulimit -l unlimited, before ranks start: InfiniBand locks what it sends"
        yield Finding("limits", "locked memory", "problem", _size(locked), advice)
    else:
        yield Finding("limits", "locked memory", "ok", f"{_size(locked)}; only InfiniBand needs more")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        yield Finding("limits", "open files", "ok", "unlimited")
    elif files >= 4096:
        yield Finding("limits", "open files", "ok", str(files))
    else:
        advice = "ulimit -n 4096, before ranks start: each holds sockets to every peer"
        yield Finding("limits", "open files", "note" if files >= 256 else "problem", str(files), advice)


def _shared_memory(size: int, free: int) -> Finding:
    detail = f"{_size(free)} free of {_size(size)}"
    if size < GIB:
        advice = "give the container more (docker run --ipc=host): ranks on one machine pass data there"
    elif free < GIB:
        advice = "remove what ended processes left in /dev/shm: ranks on one machine pass data there"
    else:
        return Finding("limits", "/dev/shm", "ok", detail)
    return Finding("limits", "/dev/shm", "problem", detail, advice)


def _threads() -> Iterator[Finding]:
    import torch

    threads, cores, requested = torch.get_num_threads(), _cores(), os.environ.get("OMP_NUM_THREADS")
    detail = f"torch takes {threads}, usable cores: {cores}" + (f", OMP_NUM_THREADS={requested}" if requested else "")
    if threads > cores:
        advice = f"export OMP_NUM_THREADS={cores}: threads that share a core slow each other down"
        yield Finding("threads", "torch", "problem", detail, advice)
    elif requested and threads < cores:
        advice = "unset OMP_NUM_THREADS where one process has the machine to itself"
        yield Finding("threads", "torch", "note", detail, advice)
    else:
        yield Finding("threads", "torch", "ok", detail)


_PROBES: dict[str, Callable[[], Iterator[Finding]]] = {
    "python": _python,
    "machine": _machine,
    "torch": _torch,
    "triton": _triton,
    "devices": _devices,
    "kernels": _kernels,
    "process groups": _process_groups,
    "transports": _transports,
    "launchers": _launchers,
    "listens": _listens,
    "limits": _limits,
    "threads": _threads,
}


def _build() -> tuple[str, str]:
    """Return the platform that torch was built for, and its version."""
    import torch

    for name, attribute in (("CUDA", "cuda"), ("ROCm", "hip"), ("XPU", "xpu")):
        version = getattr(torch.version, attribute, None)
        if version:
            return name, str(version)
    return "CPU", ""


def _visible(build: str) -> tuple[list[str], str]:
    """Return descriptions of the GPUs that torch sees, and the warnings that torch gave meanwhile."""
    import torch

    if build == "CPU":
        return [], ""
    module = torch.xpu if build == "XPU" else torch.cuda
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            count = module.device_count() if module.is_available() else 0
            gpus = [module.get_device_properties(index) for index in range(count)]
        except Exception as error:
            return [], _describe(error)
    names = []
    for gpu in gpus:
        compute = f", compute {gpu.major}.{gpu.minor}" if build == "CUDA" else ""
        names.append(f"{gpu.name}, {_size(gpu.total_memory)}{compute}")
    return names, "; ".join(_first_line(str(warning.message)) for warning in caught)


def _gpus() -> dict[_Vendor, tuple[int, int]]:
    """Return, by vendor, the number of GPUs on this machine, and of those that this container or job was given."""
    nvidia = sum(path.name.removeprefix("nvidia").isdigit() for path in (_ROOT / "dev").glob("nvidia*"))
    listed = len(list((_ROOT / "proc/driver/nvidia/gpus").glob("*")))
    # AMD's driver lists CPUs too, with GPU id 0.
    nodes = (_ROOT / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    amd = sum(_read(node).strip() not in ("", "0") for node in nodes)
    kfd = (_ROOT / "dev/kfd").exists()
    vendors = (_ROOT / "sys/class/drm").glob("renderD*/device/vendor")
    intel = {path.parents[1].name for path in vendors if _read(path).strip() == "0x8086"}
    given = {path.name for path in (_ROOT / "dev/dri").glob("renderD*")}
    return {
        _NVIDIA: (max(nvidia, listed), nvidia),
        _AMD: (max(amd, int(kfd)), max(amd, 1) if kfd else 0),
        _INTEL: (len(intel), len(intel & given)),
    }


def _cores() -> int:
    """Return the cores that this process may use, by its affinity and its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("sys/fs/cgroup/cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    return cores


def _memory() -> tuple[int, int]:
    """Return the bytes of memory, total and free, within the container's limit."""
    fields = {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+): +(\d+) kB", _read("proc/meminfo"))}
    total = fields.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("sys/fs/cgroup/memory.max").strip()
    if limit.isdigit():
        total = min(total, int(limit))
    return total, min(total, fields.get("MemAvailable", total))


def _version(program: str) -> str:
    """Return the first line that a program prints for --version."""
    command = [program, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        return f"no version ({_describe(error)})"
    line = _first_line((done.stdout + b"\n" + done.stderr).decode(errors="replace"))
    return line or f"no version (exit code {done.returncode})"


def _read(path: str | Path) -> str:
    """Return the text of a small system file; empty if it is missing or not readable."""
    try:
        return (_ROOT / path).read_text(errors="replace")
    except OSError:
        return ""


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(str(error))}".removesuffix(": ")


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version.

    >>> _numbers("2.11.0a0+git123")
    (2, 11)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _size(num_bytes: float) -> str:
    """Return a number of bytes as text with a unit.

    >>> _size(3 * 2**29), _size(65536)
    ('1.5 GiB', '64 KiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop(0)
    return f"{num_bytes:.4g} {units[0]}"
