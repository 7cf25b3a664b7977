"""Cross-compile the fused GEMM + collective kernels for other GPUs: they fit, and main loops do not spill.

As in `test_gemm_compile.py`, compilation runs in a separate process, which executes this file as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cross import TARGETS, Built, _pretend, environment_of, missing_tool
from meshflash.gemm.configs import HOPPER_CANDIDATES, Config

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
NUM_SMS = 132


@dataclass(frozen=True)
class Call:
    """A fused GEMM of `size` in each dimension, in a given or the default configuration.

    `layout` is that of `GemmProblem`. TMA cannot load operands that are not `aligned`.
    """

    collective: str
    variant: str
    shots: int | None = None
    dtype: str = "bfloat16"
    aligned: bool = True
    reduce: str = "float32"
    timed: bool = False
    config: tuple[int, ...] = ()
    world: int = 4
    layout: str = "nn"
    size: int = 4096

    def is_warp_specialized(self, target: str) -> bool:
        """Return whether the warp-specialized kernel runs; it is the default in half precision on Hopper."""
        requested = Config(*self.config).warp_specialized if self.config else self.dtype != "float32"
        fits = self.collective == "all_scatter" and self.variant == "epilogue" and self.aligned and self.world <= 8
        return bool(requested) and fits and target == "sm_90"

    def __str__(self) -> str:
        labels = [f"{self.shots}-shot"] * bool(self.shots) + ["unaligned"] * (not self.aligned) + ["timed"] * self.timed
        labels += ["x".join(map(str, self.config))] * bool(self.config) + [f"{self.world} ranks"] * (self.world != 4)
        labels += [self.layout] * (self.layout != "nn") + [f"size {self.size}"] * (self.size != 4096)
        return " ".join((self.collective, self.variant, self.dtype, f"reduce {self.reduce}", *labels))


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
        call: x if isinstance(x, str) else [Built(**built) for built in x]
        for call, x in zip(calls, answers, strict=True)
    }


def main(target: str, encoded: str, into: str) -> None:
    """Write the kernels of each call, or its error message, as JSON to the file `into`."""
    from meshflash.gemm import configs
    from meshflash.gemm import plan as gemm_plan

    built: list[Built] = []
    answers: list[Any] = []
    _pretend(target, built)
    vars(configs)["num_sms"] = lambda device: NUM_SMS
    gemm_plan.GemmProblem.unsupported_reason = None  # type: ignore[assignment,method-assign] # no kernel runs on device "meta"
    for fields in json.loads(encoded):
        built.clear()
        try:
            make(Call(**fields | {"config": tuple(fields["config"])}))
            answers.append([asdict(one) for one in built])
        except Exception as error:  # compilers raise errors of any type; go on with the other calls
            answers.append(f"{type(error).__name__}: {error}")
    Path(into).write_text(json.dumps(answers))


def make(call: Call) -> None:
    """Run the stages of a call on meta tensors; each launch compiles its kernel."""
    import torch

    from meshflash.gemm.distributed.exchange import Exchange
    from meshflash.gemm.distributed.launch import CallBuffers, describe_peer_columns
    from meshflash.gemm.distributed.plan import plan_fused
    from meshflash.gemm.distributed.problem import DistributedGemm

    device, world, size = torch.device("meta"), call.world, call.size
    dtype = getattr(torch, call.dtype)
    problem = DistributedGemm.of(
        *(call.collective, size, size, size, world, dtype), reduce_dtype=getattr(torch, call.reduce)
    )
    config = Config(*call.config) if call.config else None
    plan = plan_fused(problem, device, variant=call.variant, shots=call.shots, config=config)

    def empty(*shape: int, buffer_dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=buffer_dtype, device=device)

    heap_buffers: dict[str, Any] = {
        name: empty(*shape, buffer_dtype=buffer_dtype) for name, (shape, buffer_dtype) in plan.buffers().items()
    }
    begun = heap_buffers["begun"]
    starts, words = empty(world + 1, buffer_dtype=torch.int32), empty(world, buffer_dtype=torch.int64)
    exchange = Exchange.__new__(Exchange)
    exchange.plan, exchange.mode, exchange._section_starts = plan, "torch", starts
    exchange._own_section = {world - 1: starts}
    vars(exchange).update(heap=SimpleNamespace(device=device), _local_gemm=lambda a, b: empty(a.shape[0], b.shape[1]))
    flags = {name: heap_buffers.get(name, begun) for name in ("begun", "arrived", "flags", "ready")}
    data = {name: heap_buffers[name][0] if name in heap_buffers else begun for name in ("inbox", "matrix")}
    times = empty(10, 3, buffer_dtype=torch.int64) if call.timed else None
    tables: dict[str, Any] = {"bases": words, "status": words, "section_starts": starts, "expected": words}
    columns = describe_peer_columns(plan, world - 1, [data["matrix"]] * world)
    buffers = CallBuffers(rank=world - 1, epoch=5, peer_columns=columns, times=times, **flags, **data, **tables)
    shard = size // world
    m, k, n = {"all_scatter": (size, size, shard), "ag_gemm": (shard, size, size)}.get(
        call.collective, (size, shard, size)
    )

    def matrix(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return matrix(columns, rows, False).T
        return empty(rows, columns + (not call.aligned))[:, :columns]

    a, b = matrix(m, k, call.layout[0] == "t"), matrix(k, n, call.layout[1] == "t")
    for stage in exchange._stages(buffers, a, b, {}):
        stage.launch()


COLLECTIVES = (("all_scatter", None), ("all_reduce", 1), ("all_reduce", 2), ("ag_gemm", None), ("gemm_rs", None))
ANYWHERE = (
    *(
        Call(collective, variant, shots)
        for collective, shots in COLLECTIVES
        for variant in ("epilogue", "producer_consumer", "bulk")
    ),
    *(Call(collective, "epilogue", shots, aligned=False) for collective, shots in COLLECTIVES),
    *(Call(collective, "epilogue", shots, "float32") for collective, shots in COLLECTIVES),
    *(Call(collective, "producer_consumer", shots, timed=True) for collective, shots in COLLECTIVES),
    Call("all_reduce", "epilogue", 1, "float16", reduce="float16"),
    Call("gemm_rs", "epilogue", None, reduce="bfloat16"),
)
#: Warp-specialized configurations, also with one stage less, which leaves shared memory for two output buffers.
WARP_SPECIALIZED = tuple(
    replace(config, num_stages=config.num_stages - fewer)
    for config in HOPPER_CANDIDATES
    if config.warp_specialized
    for fewer in (0, 1)
)
#: Calls with split tiles: a tail after two waves, and half a wave in which each tile has two splits.
SPLIT = (
    *(Call("all_scatter", "epilogue", config=astuple(config), size=6144) for config in WARP_SPECIALIZED[:3:2]),
    Call("all_scatter", "epilogue", config=astuple(WARP_SPECIALIZED[0]), world=8),
    Call("all_scatter", "epilogue", config=astuple(WARP_SPECIALIZED[0]), world=8, timed=True),
)
#: Hopper: the warp-specialized kernel, and calls that ask for it where it does not apply.
HOPPER = (
    *SPLIT,
    *(Call("all_scatter", "epilogue", config=astuple(config)) for config in WARP_SPECIALIZED),
    *(Call("all_scatter", "epilogue", config=astuple(WARP_SPECIALIZED[0]), world=world) for world in (1, 2, 16)),
    *(
        Call("all_scatter", "epilogue", config=astuple(WARP_SPECIALIZED[0]), layout=layout)
        for layout in ("nt", "tn", "tt")
    ),
    Call("all_scatter", "epilogue", None, "float16", config=astuple(WARP_SPECIALIZED[0])),
    Call("all_scatter", "epilogue", config=astuple(WARP_SPECIALIZED[0]), aligned=False),
    *(Call("all_scatter", variant, config=astuple(WARP_SPECIALIZED[0])) for variant in ("producer_consumer", "bulk")),
    *(Call(collective, "epilogue", config=astuple(WARP_SPECIALIZED[1])) for collective in ("ag_gemm", "gemm_rs")),
)
ALL = {target: (*ANYWHERE, *(HOPPER if target == "sm_90" else ())) for target in ("sm_90", "sm_100", "sm_80", "gfx942")}
#: Compiled in the ordinary test run: all_scatter with and without warp specialization, a two-shot all-reduce, and two
#: ag_gemm that load by TMA; one of them makes its descriptors on the device.
FEW = (
    SPLIT[0],
    Call("all_reduce", "epilogue", 2),
    Call("ag_gemm", "producer_consumer"),
    Call("ag_gemm", "epilogue"),
)
#: Bound on spilled bytes per thread, outside of the main loop.
MAX_SPILLED_BYTES = {"sm_90": 0, "sm_100": 192, "sm_80": 0, "gfx942": 0}
#: Bound for the reduction kernel, which is bound by memory latency.
MAX_SPILLED_BYTES_IN_REDUCTION = 8


def check(target: str, call: Call, built: list[Built] | str) -> None:
    """Check that the kernels of a call are the expected ones and fit the target."""
    assert not isinstance(built, str), built
    kernels = [kernel.kernel for kernel in built]
    assert kernels[0] == "send"
    assert (built[0].barrier > 0) == call.is_warp_specialized(target), (
        "only the warp-specialized kernel has named barriers"
    )
    assert ("send_split_tiles" in kernels) == (call in SPLIT)
    assert len(kernels) > 1 or (call.collective, call.variant) == ("ag_gemm", "bulk")
    for kernel in built:
        assert kernel.shared <= TARGETS[target].shared, kernel
        assert kernel.registers <= TARGETS[target].registers, kernel
        assert kernel.spilled <= max(
            MAX_SPILLED_BYTES[target], MAX_SPILLED_BYTES_IN_REDUCTION * (kernel.kernel == "reduce_tiles")
        ), kernel
        assert not kernel.serialized, kernel
    # the GEMM of the bulk variant is a kernel of test_gemm_compile.py
    if target == "sm_90" and call.dtype != "float32" and call.aligned and call.variant != "bulk":
        gemm = built[1 if call.collective == "ag_gemm" else 0]
        assert gemm.local == 0, "the main loop loads by TMA, multiplies by wgmma and does not spill"


def test_representative_fused_kernels_fit_hopper():
    if lacking := missing_tool("sm_90"):
        pytest.skip(f"this machine has no {lacking}")
    for call, built in compiled("sm_90", FEW).items():
        check("sm_90", call, built)


@cache
def compile_all(target: str) -> dict[Call, list[Built] | str]:
    """Compile all calls of a target once for all tests."""
    return compiled(target, ALL[target])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "call"),
    [pytest.param(target, call, id=f"{target} {call}") for target, calls in ALL.items() for call in calls],
)
def test_all_fused_kernels_fit_their_gpu(target, call):
    if lacking := missing_tool(target):
        pytest.skip(f"this machine has no {lacking}")
    check(target, call, compile_all(target)[call])


if __name__ == "__main__":
    main(*sys.argv[1:])
