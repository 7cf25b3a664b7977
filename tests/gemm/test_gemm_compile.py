"""Cross-compile the GEMM kernels for other GPUs: they fit, do not spill, and overlap WGMMA with loads.

As in `cross.py`, compilation runs in a separate process, which executes this file as a script under a driver that only
reports its target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cross import TARGETS, Built, _pretend, environment_of, missing_tool
from meshflash.gemm import configs
from meshflash.gemm import plan as gemm_plan
from meshflash.gemm.configs import HOPPER_CANDIDATES, Config

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
#: SMs of the target GPU.
NUM_SMS = 132


@dataclass(frozen=True)
class Call:
    """A GEMM to compile: in configuration `config`, or else in entry `index` of the target's table.

    With `wide`, strides are so large that offsets need int64. `out` is the dtype of the result, if not that of A and B.
    """

    mode: str
    config: tuple[int, ...] = ()
    index: int = 0
    dtype: str = "bfloat16"
    layout: str = "nn"
    aligned: bool = True
    activation: str | None = None
    preact: bool = False
    wide: bool = False
    out: str = ""

    def __str__(self) -> str:
        config = "x".join(map(str, self.config)) or f"#{self.index}"
        labels = [self.activation] if self.activation else []
        labels += [word for word in ("preact", "wide") if getattr(self, word)] + ["unaligned"] * (not self.aligned)
        labels += [f"to {self.out}"] if self.out else []
        return " ".join((self.mode, config, self.dtype, self.layout, *labels))


def compiled(target: str, calls: Sequence[Call]) -> dict[Call, list[Built] | str]:
    """Return the kernels of each call, or the compiler's error."""
    with tempfile.TemporaryDirectory() as folder:  # kernels from Triton's cache come without a ptxas log
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **environment_of(folder), "PYTHONPATH": paths}
        environment.pop("TRITON_INTERPRET", None)
        into = Path(folder, "built.json")
        encoded = json.dumps([asdict(call) for call in calls])
        run = subprocess.run(
            [sys.executable, "-P", __file__, target, encoded, str(into)],
            env=environment,
            capture_output=True,
            text=True,
        )
        if run.returncode:
            raise RuntimeError(f"compiling for {target}: {run.stderr or run.stdout}")
        answers = json.loads(into.read_text())
    return {
        call: x if isinstance(x, str) else [Built(**one) for one in x] for call, x in zip(calls, answers, strict=True)
    }


def main(target: str, encoded: str, into: str) -> None:
    """Write the kernels of each call, or its error message, as JSON to the file `into`."""
    built: list[Built] = []
    answers: list[Any] = []
    _pretend(target, built)
    vars(configs)["num_sms"] = lambda device: NUM_SMS
    for fields in json.loads(encoded):
        built.clear()
        try:
            make(Call(**fields | {"config": tuple(fields["config"])}))
            answers.append([asdict(one) for one in built])
        except Exception as error:  # compilers raise errors of any type; go on with the other calls
            answers.append(f"{type(error).__name__}: {error}")
    Path(into).write_text(json.dumps(answers))


def make(call: Call) -> None:
    """Run a GEMM on meta tensors; each launch compiles its kernel."""
    import torch

    from meshflash.gemm.launch import Epilogue, run

    dtype = torch.float32 if call.dtype == "tf32" else getattr(torch, call.dtype)
    precision = "tf32" if call.dtype == "tf32" else "ieee"

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return matrix(columns, rows, False).T
        stride = 2**22 + 1 if call.wide else columns if call.aligned else columns + 1
        return torch.empty(rows, stride, dtype=dtype, device="meta")[:, :columns]

    size = 1024
    m, n = (size // 2, size // 2) if call.mode == "split_k" else (5 * size, size)  # less than one wave, or more
    a, b = matrix(m, size, call.layout[0] == "t"), matrix(size, n, call.layout[1] == "t")
    problem = gemm_plan.GemmProblem.of(a, b, precision)
    table = configs.table(problem.dtype_name, problem.tma_aligned, a.device)
    config = Config(*call.config) if call.config else table[call.index]
    plan = gemm_plan.make_plan(problem, call.mode, config, "")
    bias = torch.empty(n, device="meta") if call.activation else None
    out = getattr(torch, call.out) if call.out else dtype
    run(plan, a, b, precision, Epilogue(out, bias, call.activation, call.preact))


#: A configuration of the warp-specialized kernel.
WARP_SPECIALIZED = astuple(next(config for config in HOPPER_CANDIDATES if config.warp_specialized))
#: Shipped configurations on Hopper: the operand layouts of forward and backward, and every epilogue.
HOPPER = (
    *(Call(mode, astuple(config)) for config in HOPPER_CANDIDATES for mode in ("stream_k", "data_parallel")),
    *(Call("split_k", index=index) for index in range(3)),
    *(Call("stream_k", index=index, layout=layout) for index in range(3) for layout in ("nt", "tn", "tt")),
    *(
        Call("stream_k", activation=name, preact=preact)
        for name in ("relu", "gelu", "silu")
        for preact in (False, True)
    ),
    *(Call("stream_k", astuple(config), out="float32") for config in HOPPER_CANDIDATES),
    *(Call("stream_k", WARP_SPECIALIZED, layout=layout) for layout in ("nt", "tn", "tt")),
    *(
        Call("stream_k", WARP_SPECIALIZED, activation=name, preact=preact)
        for name in ("relu", "gelu")
        for preact in (False, True)
    ),
    *(Call("stream_k", out="float32", activation="gelu", preact=preact) for preact in (False, True)),
    Call("stream_k", dtype="float16"),
)
ANYWHERE = (
    *(Call(mode, index=index) for index in range(3) for mode in ("stream_k", "data_parallel", "split_k")),
    *(Call("stream_k", index=index, aligned=False) for index in range(3)),
    *(Call("stream_k", index=index, dtype=dtype) for index in range(3) for dtype in ("float32", "tf32")),
    Call("stream_k", wide=True),
    Call("stream_k", dtype="float32", activation="gelu", preact=True),
)
ALL = {"sm_90": (*HOPPER, *ANYWHERE), "sm_100": ANYWHERE, "sm_80": ANYWHERE, "gfx942": ANYWHERE}
#: Compiled in the ordinary test run: the kernel of large GEMMs.
FEW = (Call("stream_k"),)
#: Bound on spilled bytes per thread, outside of the main loop.
MAX_SPILLED_BYTES = {"sm_90": 0, "sm_100": 192, "sm_80": 0, "gfx942": 0}
#: Bound where two float32 results are stored: output and pre-activation.
MAX_SPILLED_BYTES_TWO_OUTPUTS = 16


def check(target: str, built: dict[Call, list[Built] | str], call: Call) -> None:
    """Check that the kernels of a call fit the target."""
    kernels = built[call]
    assert not isinstance(kernels, str), kernels
    assert len(kernels) == 1 + (call.mode != "data_parallel"), "a second kernel combines split tiles"
    for kernel in kernels:
        assert kernel.shared <= TARGETS[target].shared, kernel
        assert kernel.registers <= TARGETS[target].registers, kernel
        assert kernel.spilled <= (
            MAX_SPILLED_BYTES_TWO_OUTPUTS if call.preact and call.out else MAX_SPILLED_BYTES[target]
        ), kernel
        assert not kernel.serialized, kernel
    if target == "sm_90" and call.dtype in ("bfloat16", "float16") and call.aligned and not call.wide:
        assert kernels[0].local == 0, "the main loop loads by TMA, multiplies by wgmma and does not spill"


def test_kernel_of_large_gemms_fits_hopper():
    if lacking := missing_tool("sm_90"):
        pytest.skip(f"this machine has no {lacking}")
    built = compiled("sm_90", FEW)
    for call in FEW:
        check("sm_90", built, call)


@cache
def compile_all(target: str) -> dict[Call, list[Built] | str]:
    """Compile all calls of a target once for all tests."""
    return compiled(target, ALL[target])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "call"),
    [pytest.param(target, call, id=f"{target} {call}") for target, calls in ALL.items() for call in calls],
)
def test_all_gemm_kernels_fit_their_gpu(target, call):
    if lacking := missing_tool(target):
        pytest.skip(f"this machine has no {lacking}")
    check(target, compile_all(target), call)


def test_configurations_with_two_ctas_per_sm_fit_shared_memory_and_registers():
    """Shared memory is estimated from the blocks, as in the compiled kernels."""
    for config in HOPPER_CANDIDATES:
        stages = config.num_stages * (config.block_m + config.block_n) * config.block_k * 2
        output_buffer = config.block_m * config.block_n
        assert config.ctas_per_sm * (stages + output_buffer + 2048) <= 228 * 1024, config
        assert config.ctas_per_sm * config.num_warps * 32 * 255 <= 65536 or config.ctas_per_sm == 1, config


if __name__ == "__main__":
    main(*sys.argv[1:])
