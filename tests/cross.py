"""Cross-compile the Triton and Gluon kernels of a call for GPUs that this machine does not have.

Calls go through the real launch code, with tensors on the meta device and a Triton driver that only reports its target.
Each launch stops after compilation. The compiled kernel is therefore the one that would run, down to the alignment of
every argument. Compilation runs in separate processes, which execute this file as a script: Triton decides at import
whether kernels are interpreted, and under pytest they are.
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

TOKENS, HEADS, KV_HEADS = 4096, 8, 2
#: Launch options that make up a kernel's configuration.
CONFIG = ("BLOCK_M", "BLOCK_N", "BLOCK", "num_warps", "num_stages")


@dataclass(frozen=True)
class Target:
    """A GPU architecture and the limits of one CTA on it.

    `warp` is the number of threads in a warp, `shared` the shared memory of a CTA in bytes, `registers` the maximum
    per thread. `descriptors` says whether the GPU has TMA descriptors.
    """

    backend: str
    arch: int | str
    warp: int
    shared: int
    registers: int = 255
    descriptors: bool = False


TARGETS = {
    # sm_80 itself has 163 KiB; its configurations also serve sm_86 and sm_89, which have 99 KiB
    "sm_80": Target("cuda", 80, 32, 99 * 1024),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, descriptors=True),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, descriptors=True),
    # half of the 512 registers are accumulator registers (AGPRs)
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, registers=512),
}
#: Columns of tensor memory, on GPUs that have it. Triton replaces a kernel that needs more by a trap.
TENSOR_MEMORY = 512


@dataclass(frozen=True)
class Call:
    """One attention call to compile; `str` of it is the id of its test cases.

    `kind` is "forward", "backward", "deterministic" (a deterministic backward) or "rowwise" (merge and delta kernels).
    `features` turns on all features that the kernel supports. `aligned` rows begin at multiples of 16 bytes. `hopper`
    selects the warp-specialized Hopper kernel instead of the portable Triton kernel.

    `mask` is "causal", "full", "window", "window and first" (several runs of visible blocks per tile), "documents"
    (causal, of any length), "full documents" (not causal) or "padding" (causal documents, then padding).

    With `carry`, a forward continues from a carried (out, LSE) and a backward adds to existing gradients. `odd`
    sequence lengths are not a multiple of the block size. `spread_q_heads` gives each query head of a GQA group its
    own CTA. `split_kv` splits the KV range of the forward's tail wave; only query lengths are odd then.
    """

    kind: str
    dim: int
    dtype: str = "bfloat16"
    features: bool = False
    aligned: bool = True
    hopper: bool = False
    mask: str = "causal"
    carry: bool = False
    kv_heads: int = KV_HEADS
    odd: bool = False
    spread_q_heads: bool = False
    split_kv: bool = False

    def __str__(self) -> str:
        labels = ("features",) * self.features + ("unaligned",) * (not self.aligned) + ("hopper",) * self.hopper
        labels += (self.mask,) * (self.mask != "causal") + ("carry",) * self.carry + ("odd",) * self.odd
        labels += ("spread q heads",) * self.spread_q_heads + ("split-KV",) * self.split_kv
        labels += (f"{self.kv_heads} kv heads",) * (self.kv_heads != KV_HEADS)
        return " ".join((self.kind, str(self.dim), self.dtype, *labels))


@dataclass(frozen=True)
class Built:
    """The resources of one compiled kernel: shared memory in bytes, tensor memory in columns, registers per thread.

    `spilled` is the number of bytes that each thread spills. `serialized` says whether ptxas gave up overlapping WGMMA
    instructions. `local` counts local-memory instructions in the unmasked GEMM loops; it is None if the kernel has no
    such loop or the target is not sm_90. `barrier` is the highest number of a hardware barrier that the compiler uses
    itself. `code` is the SHA-256 of the machine code, or of the assembly for AMD GPUs, without symbol names.
    `reused_mbarriers` are shared-memory addresses that hold an mbarrier and also other data, which PTX forbids.
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


def missing_tool(target: str) -> str | None:
    """Return the name of a tool that this machine lacks for compiling for a target, or None."""
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
                getattr(knobs.nvidia, tool).path  # noqa: B018 - the lookup raises if the tool does not exist
            except RuntimeError:
                return tool
    return None


def environment_of(folder: str) -> dict[str, str]:
    """Return variables for a compiling process: empty caches of kernels and rates, no source lines in machine code."""
    return {"TRITON_CACHE_DIR": folder, "MESHFLASH_RATES": folder, "TRITON_DISABLE_LINE_INFO": "1"}


def compiled(target: str, calls: Sequence[Call]) -> dict[Call, list[Built] | str]:
    """Compile the calls in a separate process; return the kernels of each call, or its error message."""
    with tempfile.TemporaryDirectory() as folder:  # kernels from Triton's cache come without a ptxas log
        environment = {**os.environ, **environment_of(folder)}
        environment.pop("TRITON_INTERPRET", None)
        encoded = json.dumps([asdict(call) for call in calls])
        command = [sys.executable, "-P", __file__, target, encoded, str(Path(folder, "built.json"))]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"compiling for {target}: {run.stderr or run.stdout}")
        answers = json.loads(Path(folder, "built.json").read_text())
    return {
        call: answer if isinstance(answer, str) else [Built(**built) for built in answer]
        for call, answer in zip(calls, answers, strict=True)
    }


class _Driver:
    """A Triton driver that reports a GPU which this machine does not have."""

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
    """Make this process compile for the target: each launch only compiles, and appends its kernel to `built`."""
    import torch
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from meshflash.kernels import rates
    from meshflash.kernels.hopper import launch as hopper_launch
    from meshflash.kernels.hopper import support
    from meshflash.kernels.triton import configs as triton_configs
    from meshflash.kernels.triton import launch as triton_launch
    from meshflash.kernels.triton import rowwise

    target = TARGETS[name]
    driver.set_active(_Driver(target))
    knobs.nvidia.dump_ptxas_log = True
    torch.version.hip = "6" if target.backend == "hip" else None
    vars(torch.cuda)["get_device_capability"] = lambda device: divmod(int(target.arch), 10)
    for module in (support, triton_configs, triton_launch):
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
        if kernel.hash not in known:  # a second launch finds it in Triton's cache, without a ptxas log
            config = {key: constants[key] for key in CONFIG if key in constants}
            known[kernel.hash] = _built(self.__name__.strip("_"), config, kernel, log.getvalue())
        built.append(known[kernel.hash])

    JITFunction.run = compile_only


def _built(name: str, config: dict[str, int], kernel: Any, log: str) -> Built:
    """Read the resources of a compiled kernel from its metadata, its code and the ptxas log."""
    shared, tensor_memory = kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", None) or 0
    if "amdgcn" in kernel.asm:
        facts = dict(re.findall(r"^\s*\.(\w+):\s+(\d+)$", kernel.asm["amdgcn"], re.MULTILINE))
        registers, spilled = int(facts["vgpr_count"]), int(facts["private_segment_fixed_size"])
        code = hashlib.sha256(_without_names(kernel.asm["amdgcn"], kernel.name).encode()).hexdigest()
        return Built(name, config, shared, tensor_memory, registers, spilled, False, None, code=code)
    used, spills = re.search(r"Used (\d+) registers", log), re.findall(r"(\d+) bytes spill", log)
    assert used, log
    local = _count_local_accesses(kernel.asm["cubin"]) if kernel.metadata.target.arch == 90 else None
    serialized = "are serialized" in log
    barriers = re.findall(r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|arrive)(?:\.aligned)?\s+(\d+)", kernel.asm["ptx"])
    barrier = max(map(int, barriers), default=0)
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
    """Return assembly without comments, empty lines and the kernel's name."""
    lines = (line.split(";")[0].rstrip() for line in assembly.replace(kernel, "KERNEL").splitlines())
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith((".file", ".ident")))


def _code_sections(cubin: bytes) -> list[bytes]:
    """Return the contents of the sections .text.KERNEL of a 64-bit ELF file, which hold the instructions."""
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


def _count_local_accesses(cubin: bytes) -> int | None:
    """Return the number of local-memory instructions in the hot loops, or None if no loop has a WGMMA."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops = [body for body in _loops(sass) if "HGMMA" in body]
    inner = [body for body in loops if not any(other != body and other in body for other in loops)]
    hot = [body for body in inner if "FSEL" not in body] or inner  # most blocks need no mask, hence no FSEL
    return sum(len(re.findall(r"\b(?:LDL|STL)\b", body)) for body in hot) if hot else None


def _loops(sass: str) -> list[str]:
    """Return the instructions of each loop: from the target of a backward branch to the branch."""
    code = [(int(at, 16), text) for at, text in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)]
    back = [(int(to[1], 16), at) for at, text in code if (to := re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text))]
    return ["\n".join(text for at, text in code if begin <= at <= end) for begin, end in back if begin < end]


def _make(call: Call) -> None:
    """Make the call on meta tensors, under the driver that `_pretend` installed."""
    import torch

    from meshflash import Mask
    from meshflash.core.tiles import worklist
    from meshflash.kernels.contract import Features, Grads, Inputs, Rows
    from meshflash.kernels.hopper import launch as hopper_launch
    from meshflash.kernels.hopper import split_kv, support
    from meshflash.kernels.hopper.kernel import Hopper
    from meshflash.kernels.triton import rowwise
    from meshflash.kernels.triton.kernel import Triton

    tokens = TOKENS - call.odd
    keys = TOKENS if call.split_kv else tokens  # splits are whole blocks of keys

    def rows(heads: int, length: int = tokens) -> torch.Tensor:
        stride = call.dim if call.aligned else call.dim + 1
        whole = torch.empty(2, length, heads, stride, dtype=getattr(torch, call.dtype), device="meta")
        return whole[..., : call.dim]

    def float32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device="meta")

    out, lse = rows(HEADS), float32(2, HEADS, tokens)
    if call.kind == "rowwise":
        rowwise.merge(out, lse, out, lse, out, lse)
        rowwise.merge_gradient(out, lse, out, lse, out, lse, out, lse)
        rowwise.delta(out, out, lse, lse, lse)
        return
    os.environ["MESHFLASH_GLUON"] = str(int(call.hopper))
    support.forget()
    vars(hopper_launch)["spreads_heads"] = lambda *_: call.spread_q_heads
    mask, features = Mask.causal(), Features(scale=call.dim**-0.5)
    if call.mask == "full":
        mask = Mask.full()
    if call.mask == "window":
        mask &= Mask.window(1023, 0)
    if call.mask == "window and first":
        mask &= Mask.window(1000, 0) | Mask.first(130)
    if call.mask in ("documents", "full documents", "padding"):
        padding = 500 if call.mask == "padding" else 0
        documents = Mask.documents([1601, 7, 95, tokens - 1703 - padding], pad=True)
        mask = documents if call.mask == "full documents" else mask & documents
    if call.features and call.hopper:
        features = Features(call.dim**-0.5, 30.0, sink_logits_H=float32(HEADS))
    elif call.features:
        mask &= Mask.window(1024, 0)
        slopes, sinks = float32(2, HEADS), float32(HEADS)
        features = Features(call.dim**-0.5, 30.0, 0.1, seed=7, alibi_slopes_BH=slopes, sink_logits_H=sinks)
    if call.split_kv:  # meta tables cannot be read, so the split is given: as on a GPU of 15 SMs
        items = torch.empty(4, 3, dtype=torch.int32, device="meta")
        vars(split_kv)["split_tail_wave"] = lambda tables, *_, **__: split_kv.TailWave(4, 3, 0, 512, items, tables)
    else:
        vars(split_kv)["split_tail_wave"] = lambda *_, **__: None
    work = worklist(mask, (range(tokens),), (range(keys),))
    x = Inputs(out, rows(call.kv_heads, keys), rows(call.kv_heads, keys), work, features)
    kernel = Hopper if call.hopper else Triton
    if call.kind == "forward":
        carry = float32(2, tokens, HEADS, call.dim), lse
        kernel().forward(x, *((carry, carry) if call.features or call.carry else ()))
    else:
        dq, dk, dv = (float32(2, tokens, heads, call.dim) for heads in (HEADS, call.kv_heads, call.kv_heads))
        grads = Grads(dq, dk, dv, add_dq=True, add_dkv=True) if call.carry else None
        # as the engine calls it: steps of a ring share one delta, and the gradient of sink logits reads it
        reads_delta = not call.hopper or call.carry or call.features or call.kind == "deterministic"
        rows_given = Rows(out, out, lse, lse if reads_delta else None)
        kernel(deterministic=call.kind == "deterministic").backward(x, rows_given, grads)


def main(target: str, encoded: str, into: str) -> None:
    """Write the kernels of each call, or its error message, as JSON.

    `encoded` is a JSON list of the calls' fields; `into` is the file to write.
    """
    built: list[Built] = []
    answers: list[Any] = []
    _pretend(target, built)
    for call in (Call(**fields) for fields in json.loads(encoded)):
        built.clear()
        try:
            _make(call)
            answers.append([asdict(kernel) for kernel in built])
        except Exception as error:  # compilers raise errors of any type, and the remaining calls must still compile
            answers.append(f"{type(error).__name__}: {error}")
    Path(into).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
