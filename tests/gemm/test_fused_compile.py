"""The kernels of fused products, compiled for GPUs that are not here: they fit, and loops of products do not spill.

As in `test_gemm_compile.py`, by a process of its own that runs this very file as a script.
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

from cross import TARGETS, Built, _pretend, environment_of, missing
from meshflash.gemm.configs import HOPPER_CANDIDATES, Config

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
CORES = 132


@dataclass(frozen=True)
class Call:
    """A fused product of `size` in each dimension, in a configuration or in the default one.

    `layout` is that of both operands, as plans of products call it; no descriptor describes those that are not aligned.
    """

    collective: str
    variant: str
    shots: int | None = None
    numbers: str = "bfloat16"
    aligned: bool = True
    reduce: str = "float32"
    timed: bool = False
    config: tuple[int, ...] = ()
    world: int = 4
    layout: str = "nn"
    size: int = 4096

    def has_roles(self, target: str) -> bool:
        """Whether the kernel in Gluon serves it, as default ones are of half precision on a Hopper GPU."""
        asked = Config(*self.config).roles if self.config else self.numbers != "float32"
        fits = self.collective == "all_scatter" and self.variant == "epilogue" and self.aligned and self.world <= 8
        return bool(asked) and fits and target == "sm_90"

    def __str__(self) -> str:
        more = [f"in {self.shots}"] * bool(self.shots) + ["unaligned"] * (not self.aligned) + ["timed"] * self.timed
        more += ["x".join(map(str, self.config))] * bool(self.config) + [f"{self.world} ranks"] * (self.world != 4)
        more += [self.layout] * (self.layout != "nn") + [f"of {self.size}"] * (self.size != 4096)
        return " ".join((self.collective, self.variant, self.numbers, f"by {self.reduce}", *more))


def compiled(target: str, calls: Sequence[Call]) -> dict[Call, list[Built] | str]:
    """The kernels of each call, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:  # a kernel from Triton's cache has no log of ptxas
        paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **environment_of(folder), "PYTHONPATH": paths}
        environment.pop("TRITON_INTERPRET", None)
        into = Path(folder, "built.json")
        work = json.dumps([asdict(call) for call in calls])
        run = subprocess.run(
            [sys.executable, "-P", __file__, target, work, str(into)], env=environment, capture_output=True, text=True
        )
        if run.returncode:
            raise RuntimeError(f"compiling for {target}: {run.stderr or run.stdout}")
        answers = json.loads(into.read_text())
    return {
        call: x if isinstance(x, str) else [Built(**built) for built in x]
        for call, x in zip(calls, answers, strict=True)
    }


def main(target: str, work: str, into: str) -> None:
    from meshflash.gemm import configs
    from meshflash.gemm import plan as gemm_plan

    built: list[Built] = []
    answers: list[Any] = []
    _pretend(target, built)
    vars(configs)["cores"] = lambda device: CORES
    gemm_plan.Product.unsupported_reason = None  # type: ignore[assignment,method-assign] # the device is none that kernels run on
    for fields in json.loads(work):
        built.clear()
        try:
            make(Call(**fields | {"config": tuple(fields["config"])}))
            answers.append([asdict(one) for one in built])
        except Exception as error:  # a compiler's own, of any kind, and the other calls are still to come
            answers.append(f"{type(error).__name__}: {error}")
    Path(into).write_text(json.dumps(answers))


def make(call: Call) -> None:
    """Go through the stages of a call on tensors that are not there; launches compile."""
    import torch

    from meshflash.gemm.distributed.exchange import Exchange
    from meshflash.gemm.distributed.launch import Ends, columns_of
    from meshflash.gemm.distributed.plan import plan_fused
    from meshflash.gemm.distributed.problem import FusedProduct

    device, world, size = torch.device("meta"), call.world, call.size
    dtype = getattr(torch, call.numbers)
    product = FusedProduct.of(
        *(call.collective, size, size, size, world, dtype), reduce_dtype=getattr(torch, call.reduce)
    )
    config = Config(*call.config) if call.config else None
    plan = plan_fused(product, device, variant=call.variant, shots=call.shots, config=config)

    def empty(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    rooms: dict[str, Any] = {name: empty(*shape, kind=kind) for name, (shape, kind) in plan.rooms().items()}
    begun = rooms["begun"]
    firsts, words = empty(world + 1, kind=torch.int32), empty(world, kind=torch.int64)
    exchange = Exchange.__new__(Exchange)
    exchange.plan, exchange.mode, exchange._firsts = plan, "torch", firsts
    exchange._own = {world - 1: firsts}
    vars(exchange).update(heap=SimpleNamespace(device=device), _product=lambda a, b: empty(a.shape[0], b.shape[1]))
    flags = {name: rooms.get(name, begun) for name in ("begun", "arrived", "flags", "ready")}
    data = {name: rooms[name][0] if name in rooms else begun for name in ("inbox", "matrix")}
    times = empty(10, 3, kind=torch.int64) if call.timed else None
    tables: dict[str, Any] = {"bases": words, "status": words, "firsts": firsts, "wanted": words, "times": times}
    columns = columns_of(plan, world - 1, [data["matrix"]] * world)
    ends = Ends(rank=world - 1, epoch=5, columns=columns, **flags, **data, **tables)
    some = size // world
    rows = {"all_scatter": (size, size, some), "ag_gemm": (some, size, size)}.get(call.collective, (size, some, size))
    m, k, n = rows

    def matrix(rows: int, columns: int, turned: bool) -> torch.Tensor:
        if turned:
            return matrix(columns, rows, False).T
        return empty(rows, columns + (not call.aligned))[:, :columns]

    a, b = matrix(m, k, call.layout[0] == "t"), matrix(k, n, call.layout[1] == "t")
    for stage in exchange._stages(ends, a, b, {}):
        stage.do()


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
#: Configurations in which warps have roles, also with room for all of a tile that is sent.
ROLES = tuple(
    replace(config, stages=config.stages - fewer) for config in HOPPER_CANDIDATES if config.roles for fewer in (0, 1)
)
#: Such that tiles are in parts: some after two rounds, and half a round, each tile of which is in two.
CUT = (
    *(Call("all_scatter", "epilogue", config=astuple(config), size=6144) for config in ROLES[:3:2]),
    Call("all_scatter", "epilogue", config=astuple(ROLES[0]), world=8),
    Call("all_scatter", "epilogue", config=astuple(ROLES[0]), world=8, timed=True),
)
#: Of a Hopper GPU: the kernel in Gluon, and who asks for it where it does not serve.
HOPPER = (
    *CUT,
    *(Call("all_scatter", "epilogue", config=astuple(config)) for config in ROLES),
    *(Call("all_scatter", "epilogue", config=astuple(ROLES[0]), world=world) for world in (1, 2, 16)),
    *(Call("all_scatter", "epilogue", config=astuple(ROLES[0]), layout=layout) for layout in ("nt", "tn", "tt")),
    Call("all_scatter", "epilogue", None, "float16", config=astuple(ROLES[0])),
    Call("all_scatter", "epilogue", config=astuple(ROLES[0]), aligned=False),
    *(Call("all_scatter", variant, config=astuple(ROLES[0])) for variant in ("producer_consumer", "bulk")),
    *(Call(collective, "epilogue", config=astuple(ROLES[1])) for collective in ("ag_gemm", "gemm_rs")),
)
ALL = {target: (*ANYWHERE, *(HOPPER if target == "sm_90" else ())) for target in ("sm_90", "sm_100", "sm_80", "gfx942")}
#: In the ordinary run: products that put, by warps that have roles and by others, one that adds up and puts, and two
#: whose rows come by descriptors, of which one makes them itself.
FEW = (
    CUT[0],
    Call("all_reduce", "epilogue", 2),
    Call("ag_gemm", "producer_consumer"),
    Call("ag_gemm", "epilogue"),
)
#: Bytes that a thread may spill, outside of the loop over K.
SPILLED = {"sm_90": 0, "sm_100": 192, "sm_80": 0, "gfx942": 0}
#: The same where parts are added up, which waits for memory.
SPILLED_IN_SUMS = 8


def check(target: str, call: Call, built: list[Built] | str) -> None:
    assert not isinstance(built, str), built
    kernels = [kernel.kernel for kernel in built]
    assert kernels[0] == "send"
    assert (built[0].barrier > 0) == call.has_roles(target), "groups of warps with roles have barriers of their own"
    assert ("send_sums" in kernels) == (call in CUT)
    assert len(kernels) > 1 or (call.collective, call.variant) == ("ag_gemm", "bulk")
    for kernel in built:
        assert kernel.shared <= TARGETS[target].shared, kernel
        assert kernel.registers <= TARGETS[target].registers, kernel
        assert kernel.spilled <= max(SPILLED[target], SPILLED_IN_SUMS * (kernel.kernel == "receive")), kernel
        assert not kernel.serialized, kernel
    # a bulk's product is another kernel's
    if target == "sm_90" and call.numbers != "float32" and call.aligned and call.variant != "bulk":
        multiplies = built[1 if call.collective == "ag_gemm" else 0]
        assert multiplies.local == 0, (
            "the loop copies by descriptors, multiplies by warp groups, and stays in registers"
        )


def test_fused_products_fit_a_hopper_gpu():
    if lacking := missing("sm_90"):
        pytest.skip(f"no {lacking} here")
    for call, built in compiled("sm_90", FEW).items():
        check("sm_90", call, built)


@cache
def every(target: str) -> dict[Call, list[Built] | str]:
    return compiled(target, ALL[target])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "call"),
    [pytest.param(target, call, id=f"{target} {call}") for target, calls in ALL.items() for call in calls],
)
def test_every_collective_fits(target, call):
    if lacking := missing(target):
        pytest.skip(f"no {lacking} here")
    check(target, call, every(target)[call])


if __name__ == "__main__":
    main(*sys.argv[1:])
