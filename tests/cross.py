"""Cross-compilation: what the Triton kernels of a call become on a GPU that is not here.

A call is made as the engine makes it, on tensors without storage and under a driver that only names its target;
each launch compiles its kernel and ends there. So what is compiled is what would run, down to the alignment of
every argument. It happens in processes of their own, which run this very file as a script: Triton decides when it
reads a kernel whether that is interpreted, and in the tests it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOKENS, HEADS, KEY_HEADS = 4096, 8, 2
#: What a launch is told that makes up its configuration.
CONFIG = ("BLOCK_M", "BLOCK_N", "BLOCK", "num_warps", "num_stages")


@dataclass(frozen=True)
class Target:
    """A GPU, and what a block of threads may take of it: bytes of shared memory, registers of a thread."""

    backend: str
    arch: int | str
    warp: int
    shared: int
    registers: int = 255
    descriptors: bool = False


TARGETS = {
    # what serves sm_80, of 163 KiB, is to fit sm_86 and sm_89 too
    "sm_80": Target("cuda", 80, 32, 99 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, descriptors=True),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, descriptors=True),
    # of the registers half are accumulators
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, registers=512),
}
#: Columns of tensor memory, of GPUs that have it. Triton replaces a kernel that wants more by a trap.
TENSOR_MEMORY = 512


@dataclass(frozen=True)
class Call:
    """A call of the kernels: `forward`, `backward`, `deterministic` (a backward), or `rows`.

    With `features` it has all of them, with `partial` it goes on from sums; `aligned` rows begin at multiples of 16
    bytes. With `gluon` those in Gluon serve it; `mask` is "causal", "full", "window", "runs", where blocks have
    several, "documents" of any length, which are causal, "whole documents", or "padding" behind documents. `odd`
    lengths are no multiple of a block, nor of anything else. `spread` heads of a group have programs of their own.
    Some tiles of a forward are in `parts`, and odd lengths those of queries then.
    """

    kind: str
    dim: int
    dtype: str = "bfloat16"
    features: bool = False
    aligned: bool = True
    gluon: bool = False
    mask: str = "causal"
    partial: bool = False
    key_heads: int = KEY_HEADS
    odd: bool = False
    spread: bool = False
    parts: bool = False

    def __str__(self) -> str:
        more = ("features",) * self.features + ("unaligned",) * (not self.aligned) + ("gluon",) * self.gluon
        more += (self.mask,) * (self.mask != "causal") + ("partial",) * self.partial + ("odd",) * self.odd
        more += ("spread",) * self.spread + ("parts",) * self.parts
        more += (f"{self.key_heads} key heads",) * (self.key_heads != KEY_HEADS)
        return " ".join((self.kind, str(self.dim), self.dtype, *more))


@dataclass(frozen=True)
class Built:
    """What a kernel takes: bytes of shared memory, columns of tensor memory, registers, bytes spilled of a thread.

    `serialized` is whether ptxas gave up overlapping products of warp groups; `local` how many instructions of the
    loops that multiply, where no mask cuts a block, go to local memory, None where there is no such loop or GPU.
    `barrier` is the highest number of a hardware barrier that the compiler takes for itself. `code` is the SHA-256 of
    its machine code, or of its assembly for AMD GPUs, without the names of symbols. `reused_mbarriers` are addresses in
    shared memory that hold an mbarrier and something else too, which PTX forbids.
    """

    kernel: str
    config: dict[str, int]
    shared: int
    tensor_memory: int
    registers: int
    spilled: int
    serialized: bool
    local: int | None
    barrier: int = 0
    code: str = ""
    reused_mbarriers: tuple[int, ...] = ()


def missing(target: str) -> str | None:
    """What this machine lacks for compiling for a target, or None."""
    try:
        from triton import knobs
        from triton.backends import backends
    except ImportError:
        return "triton"
    backend = {"cuda": "nvidia", "hip": "amd"}[TARGETS[target].backend]
    if backend not in backends:
        return f"triton's backend {backend}"
    if backend == "nvidia":
        for tool in ("ptxas_blackwell" if target == "sm_100" else "ptxas", "cuobjdump"):
            try:
                getattr(knobs.nvidia, tool).path  # noqa: B018 - what it looks up may not be there
            except RuntimeError:
                return tool
    return None


def environment_of(folder: str) -> dict[str, str]:
    """Environment variables of a process that compiles: no cache of kernels or rates, no lines of source in code."""
    return {"TRITON_CACHE_DIR": folder, "MESHFLASH_RATES": folder, "TRITON_DISABLE_LINE_INFO": "1"}


def compiled(target: str, calls: Sequence[Call]) -> dict[Call, list[Built] | str]:
    """The kernels of each call, or what went wrong, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:  # a kernel from Triton's cache has no log of ptxas
        environment = {**os.environ, **environment_of(folder)}
        environment.pop("TRITON_INTERPRET", None)
        work = json.dumps([asdict(call) for call in calls])
        command = [sys.executable, "-P", __file__, target, work, str(Path(folder, "built.json"))]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"compiling for {target}: {run.stderr or run.stdout}")
        answers = json.loads(Path(folder, "built.json").read_text())
    return {
        call: answer if isinstance(answer, str) else [Built(**built) for built in answer]
        for call, answer in zip(calls, answers, strict=True)
    }


class _Driver:
    """Triton's driver of a GPU that is not here."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.warp)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _pretend(name: str, built: list[Built]) -> None:
    """From here on this process believes in the target; launches compile, and add to `built`."""
    import torch
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from meshflash.kernels import rates
    from meshflash.kernels.hopper import launch as hopper_launch
    from meshflash.kernels.triton import configs as triton_configs
    from meshflash.kernels.triton import launch as triton_launch
    from meshflash.kernels.triton import rowwise

    target = TARGETS[name]
    driver.set_active(_Driver(target))
    knobs.nvidia.dump_ptxas_log = True
    torch.version.hip = "6" if target.backend == "hip" else None
    vars(torch.cuda)["get_device_capability"] = lambda device: divmod(int(target.arch), 10)
    for module in (hopper_launch, triton_configs, triton_launch):
        vars(module)["has_descriptors"] = lambda device: target.descriptors
    vars(hopper_launch)["_counter"] = lambda device: torch.empty(1, dtype=torch.int32, device=device)
    vars(hopper_launch)["num_sms"] = lambda device: 132
    rates.known = lambda device: rates._known(name, name)
    rowwise.INTERPRETED_ROWS = rowwise.MAX_ROWS
    launch = JITFunction.run
    known: dict[str, Built] = {}

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = launch(self, *arguments, grid=grid, warmup=True, **constants)
        if kernel.hash not in known:  # from Triton's cache it comes without a log
            config = {key: constants[key] for key in CONFIG if key in constants}
            known[kernel.hash] = _built(self.__name__.strip("_"), config, kernel, log.getvalue())
        built.append(known[kernel.hash])

    JITFunction.run = compile_only


def _built(name: str, config: dict[str, int], kernel: Any, log: str) -> Built:
    shared, tensor_memory = kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", None) or 0
    if "amdgcn" in kernel.asm:
        facts = dict(re.findall(r"^\s*\.(\w+):\s+(\d+)$", kernel.asm["amdgcn"], re.MULTILINE))
        registers, spilled = int(facts["vgpr_count"]), int(facts["private_segment_fixed_size"])
        code = hashlib.sha256(_without_names(kernel.asm["amdgcn"], kernel.name).encode()).hexdigest()
        return Built(name, config, shared, tensor_memory, registers, spilled, False, None, code=code)
    used, spills = re.search(r"Used (\d+) registers", log), re.findall(r"(\d+) bytes spill", log)
    assert used, log
    local = _local(kernel.asm["cubin"]) if kernel.metadata.target.arch == 90 else None
    serialized = "are serialized" in log
    numbers = re.findall(r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|arrive)(?:\.aligned)?\s+(\d+)", kernel.asm["ptx"])
    barrier = max(map(int, numbers), default=0)
    code = hashlib.sha256(b"".join(_code_sections(kernel.asm["cubin"]))).hexdigest()
    spilled = max(map(int, spills))
    reused = reused_mbarriers(kernel.asm["ptx"])
    return Built(name, config, shared, tensor_memory, int(used[1]), spilled, serialized, local, barrier, code, reused)


def reused_mbarriers(ptx: str) -> tuple[int, ...]:
    """Return the shared-memory addresses of mbarriers that are initialized twice, or that plain loads or stores reach.

    Gluon reuses the memory of an mbarrier after its last use. That is allowed only after `mbarrier.inval`.
    """
    offsets = {register: int(offset) for register, offset in re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)}
    inits = re.findall(r"mbarrier\.init\.shared(?:::cta)?\.b64 \[(%r\d+)\]", ptx)
    mbarriers = Counter(offsets.get(register, 0) for register in inits)
    access = r"(?:ld|st)\.shared\S*\s+(?:\S+, |\{[^}]*\}, )?\[\s*(?:global_smem\+(\d+)|(%r\d+) \+ 0)\s*\]"
    invalidated = {offsets.get(register, 0) for register in re.findall(r"mbarrier\.inval\S* \[(%r\d+)\]", ptx)}
    plain = {int(offset) if offset else offsets.get(register, -1) for offset, register in re.findall(access, ptx)}
    return tuple(sorted(at for at, count in mbarriers.items() if at not in invalidated and (count > 1 or at in plain)))


def _without_names(assembly: str, kernel: str) -> str:
    """Assembly without comments, empty lines and the kernel's name."""
    lines = (line.split(";")[0].rstrip() for line in assembly.replace(kernel, "KERNEL").splitlines())
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith((".file", ".ident")))


def _code_sections(cubin: bytes) -> list[bytes]:
    """The contents of the sections of a 64-bit ELF file that hold instructions: those called .text.KERNEL."""
    table_offset = struct.unpack_from("<Q", cubin, 0x28)[0]
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table_offset + n * entry_bytes) for n in range(count)]
    names_offset = sections[names_index][4]
    found = [
        cubin[offset : offset + size]
        for name, _, _, _, offset, size in sections
        if cubin[names_offset + name :].startswith(b".text.")
    ]
    assert found, "no machine code"
    return found


def _local(cubin: bytes) -> int | None:
    """How many instructions of the hot loops go to local memory."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops = [body for body in _loops(sass) if "HGMMA" in body]
    inner = [body for body in loops if not any(other != body and other in body for other in loops)]
    hot = [body for body in inner if "FSEL" not in body] or inner  # most blocks are cut by no mask
    return sum(len(re.findall(r"\b(?:LDL|STL)\b", body)) for body in hot) if hot else None


def _loops(sass: str) -> list[str]:
    """The instructions between a branch back and where it goes, for each."""
    code = [(int(at, 16), text) for at, text in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)]
    back = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text))]
    return ["\n".join(text for at, text in code if begin <= at <= end) for begin, end in back if begin < end]


def _make(call: Call) -> None:
    import torch

    from meshflash import Mask
    from meshflash.core.tiles import worklist
    from meshflash.kernels.contract import Features, Grads, Inputs, Rows
    from meshflash.kernels.hopper import launch as hopper_launch
    from meshflash.kernels.hopper import split_kv
    from meshflash.kernels.hopper.kernel import Hopper
    from meshflash.kernels.triton import rowwise
    from meshflash.kernels.triton.kernel import Triton

    tokens = TOKENS - call.odd
    keys = TOKENS if call.parts else tokens  # parts are of whole blocks

    def rows(heads: int, length: int = tokens) -> torch.Tensor:
        stride = call.dim if call.aligned else call.dim + 1
        whole = torch.empty(2, length, heads, stride, dtype=getattr(torch, call.dtype), device="meta")
        return whole[..., : call.dim]

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    out, lse = rows(HEADS), numbers(2, HEADS, tokens)
    if call.kind == "rows":
        rowwise.merge(out, lse, out, lse, out, lse)
        rowwise.merge_gradient(out, lse, out, lse, out, lse, out, lse)
        rowwise.delta(out, out, lse, lse, lse)
        return
    os.environ["MESHFLASH_GLUON"] = str(int(call.gluon))
    hopper_launch.has_gluon.cache_clear()
    vars(hopper_launch)["MIN_QUERIES_TO_SPREAD"] = 0 if call.spread else TOKENS + 1
    mask, features = Mask.causal(), Features(scale=call.dim**-0.5)
    if call.mask == "full":
        mask = Mask.full()
    if call.mask == "window":
        mask &= Mask.window(1023, 0)
    if call.mask == "runs":
        mask &= Mask.window(1000, 0) | Mask.first(130)
    if call.mask in ("documents", "whole documents", "padding"):
        padding = 500 if call.mask == "padding" else 0
        documents = Mask.documents([1601, 7, 95, tokens - 1703 - padding], pad=True)
        mask = documents if call.mask == "whole documents" else mask & documents
    if call.features and call.gluon:
        features = Features(call.dim**-0.5, 30.0, sink_logits_H=numbers(HEADS))
    elif call.features:
        mask &= Mask.window(1024, 0)
        slopes, sinks = numbers(2, HEADS), numbers(HEADS)
        features = Features(call.dim**-0.5, 30.0, 0.1, seed=7, alibi_slopes_BH=slopes, sink_logits_H=sinks)
    if call.parts:  # as few as on 15 multiprocessors: tables without storage cannot be read
        items = torch.empty(4, 3, dtype=torch.int32, device="meta")
        vars(split_kv)["split_tail_wave"] = lambda tables, *_, **__: split_kv.TailWave(4, 3, 0, 512, items, tables)
    else:
        vars(split_kv)["split_tail_wave"] = lambda *_, **__: None
    work = worklist(mask, (range(tokens),), (range(keys),))
    x = Inputs(out, rows(call.key_heads, keys), rows(call.key_heads, keys), work, features)
    kernel = Hopper if call.gluon else Triton
    if call.kind == "forward":
        partial = numbers(2, tokens, HEADS, call.dim), lse
        kernel().forward(x, *((partial, partial) if call.features or call.partial else ()))
    else:
        dq, dk, dv = (numbers(2, tokens, heads, call.dim) for heads in (HEADS, call.key_heads, call.key_heads))
        grads = Grads(dq, dk, dv, add_dq=True, add_dkv=True) if call.partial else None
        kernel(deterministic=call.kind == "deterministic").backward(x, Rows(out, out, lse, lse), grads)


def main(target: str, work: str, into: str) -> None:
    """Write the kernels of each call, or what went wrong, as JSON."""
    built: list[Built] = []
    answers: list[Any] = []
    _pretend(target, built)
    for call in (Call(**fields) for fields in json.loads(work)):
        built.clear()
        try:
            _make(call)
            answers.append([asdict(kernel) for kernel in built])
        except Exception as error:  # a compiler's own, of any kind, and the other calls are still to come
            answers.append(f"{type(error).__name__}: {error}")
    Path(into).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
