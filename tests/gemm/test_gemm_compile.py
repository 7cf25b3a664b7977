"""The kernel of products, compiled for GPUs that are not here: it fits, spills nothing, and overlaps its products.

As in `cross.py`, by a process of its own that runs this very file as a script, under a driver that only names its
target.
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

from cross import TARGETS, Built, _pretend, environment_of, missing
from meshflash.gemm import configs
from meshflash.gemm import plan as gemm_plan
from meshflash.gemm.configs import HOPPER_CANDIDATES, Config

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
#: Multiprocessors of the GPU that is not here.
CORES = 132


@dataclass(frozen=True)
class Call:
    """A product in a configuration, or in the one of this number in the table of the target."""

    mode: str
    config: tuple[int, ...] = ()
    which: int = 0
    numbers: str = "bfloat16"
    layout: str = "nn"
    aligned: bool = True
    activation: str | None = None
    keep: bool = False
    wide: bool = False
    out: str = ""

    def __str__(self) -> str:
        config = "x".join(map(str, self.config)) or f"#{self.which}"
        more = [self.activation] if self.activation else []
        more += [word for word in ("keep", "wide") if getattr(self, word)] + ["unaligned"] * (not self.aligned)
        more += [f"to {self.out}"] if self.out else []
        return " ".join((self.mode, config, self.numbers, self.layout, *more))


def compiled(target: str, calls: Sequence[Call]) -> dict[Call, list[Built] | str]:
    """The kernels of each call, or what the compiler said."""
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
        call: x if isinstance(x, str) else [Built(**one) for one in x] for call, x in zip(calls, answers, strict=True)
    }


def main(target: str, work: str, into: str) -> None:
    built: list[Built] = []
    answers: list[Any] = []
    _pretend(target, built)
    vars(configs)["cores"] = lambda device: CORES
    for fields in json.loads(work):
        built.clear()
        try:
            make(Call(**fields | {"config": tuple(fields["config"])}))
            answers.append([asdict(one) for one in built])
        except Exception as error:  # a compiler's own, of any kind, and the other calls are still to come
            answers.append(f"{type(error).__name__}: {error}")
    Path(into).write_text(json.dumps(answers))


def make(call: Call) -> None:
    import torch

    from meshflash.gemm.launch import Epilogue, run

    dtype = torch.float32 if call.numbers == "tf32" else getattr(torch, call.numbers)
    precision = "tf32" if call.numbers == "tf32" else "ieee"

    def matrix(rows: int, columns: int, turned: bool) -> torch.Tensor:
        if turned:
            return matrix(columns, rows, False).T
        stride = 2**22 + 1 if call.wide else columns if call.aligned else columns + 1
        return torch.empty(rows, stride, dtype=dtype, device="meta")[:, :columns]

    size = 1024
    m, n = (size // 2, size // 2) if call.mode == "split_k" else (5 * size, size)  # less than a wave, or more
    a, b = matrix(m, size, call.layout[0] == "t"), matrix(size, n, call.layout[1] == "t")
    product = gemm_plan.Product.of(a, b, precision)
    table = configs.table(product.numbers, product.lined, a.device)
    config = Config(*call.config) if call.config else table[call.which]
    plan = gemm_plan.plan(product, call.mode, config, "")
    bias = torch.empty(n, device="meta") if call.activation else None
    out = getattr(torch, call.out) if call.out else dtype
    run(plan, a, b, precision, Epilogue(out, bias, call.activation, call.keep))


#: The kernel in Gluon.
ROLES = astuple(next(config for config in HOPPER_CANDIDATES if config.roles))
#: What comes with meshflash, in the layouts of a forward and of a backward, with every epilogue, and unaligned.
HOPPER = (
    *(Call(mode, astuple(config)) for config in HOPPER_CANDIDATES for mode in ("stream_k", "data_parallel")),
    *(Call("split_k", which=which) for which in range(3)),
    *(Call("stream_k", which=which, layout=layout) for which in range(3) for layout in ("nt", "tn", "tt")),
    *(Call("stream_k", activation=name, keep=keep) for name in ("relu", "gelu", "silu") for keep in (False, True)),
    *(Call("stream_k", astuple(config), out="float32") for config in HOPPER_CANDIDATES),
    *(Call("stream_k", ROLES, layout=layout) for layout in ("nt", "tn", "tt")),
    *(Call("stream_k", ROLES, activation=name, keep=keep) for name in ("relu", "gelu") for keep in (False, True)),
    *(Call("stream_k", out="float32", activation="gelu", keep=keep) for keep in (False, True)),
    Call("stream_k", numbers="float16"),
)
ANYWHERE = (
    *(Call(mode, which=which) for which in range(3) for mode in ("stream_k", "data_parallel", "split_k")),
    *(Call("stream_k", which=which, aligned=False) for which in range(3)),
    *(Call("stream_k", which=which, numbers=numbers) for which in range(3) for numbers in ("float32", "tf32")),
    Call("stream_k", wide=True),
    Call("stream_k", numbers="float32", activation="gelu", keep=True),
)
ALL = {"sm_90": (*HOPPER, *ANYWHERE), "sm_100": ANYWHERE, "sm_80": ANYWHERE, "gfx942": ANYWHERE}
#: In the ordinary run: the one that large products take.
FEW = (Call("stream_k"),)
#: Bytes that a thread may spill, outside of the loop over K.
SPILLED = {"sm_90": 0, "sm_100": 192, "sm_80": 0, "gfx942": 0}
#: The same where two float32 results are stored.
SPILLED_WIDE = 16


def check(target: str, built: dict[Call, list[Built] | str], call: Call) -> None:
    kernels = built[call]
    assert not isinstance(kernels, str), kernels
    assert len(kernels) == 1 + (call.mode != "data_parallel"), "what is in parts is added up by a second one"
    for kernel in kernels:
        assert kernel.shared <= TARGETS[target].shared, kernel
        assert kernel.registers <= TARGETS[target].registers, kernel
        assert kernel.spilled <= (SPILLED_WIDE if call.keep and call.out else SPILLED[target]), kernel
        assert not kernel.serialized, kernel
    if target == "sm_90" and call.numbers in ("bfloat16", "float16") and call.aligned and not call.wide:
        assert kernels[0].local == 0, "the loop copies by descriptors, multiplies by warp groups, stays in registers"


def test_large_products_fit_a_hopper_gpu():
    if lacking := missing("sm_90"):
        pytest.skip(f"no {lacking} here")
    built = compiled("sm_90", FEW)
    for call in FEW:
        check("sm_90", built, call)


@cache
def every(target: str) -> dict[Call, list[Built] | str]:
    return compiled(target, ALL[target])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "call"),
    [pytest.param(target, call, id=f"{target} {call}") for target, calls in ALL.items() for call in calls],
)
def test_every_configuration_fits(target, call):
    if lacking := missing(target):
        pytest.skip(f"no {lacking} here")
    check(target, every(target), call)


def test_two_programs_on_a_multiprocessor_fit():
    """Where a configuration says so: shared memory by its blocks, as the compiled kernels have it, and registers."""
    for config in HOPPER_CANDIDATES:
        stages = config.stages * (config.block_m + config.block_n) * config.block_k * 2
        half_a_result = config.block_m * config.block_n
        assert config.per_core * (stages + half_a_result + 2048) <= 228 * 1024, config
        assert config.per_core * config.warps * 32 * 255 <= 65536 or config.per_core == 1, config


if __name__ == "__main__":
    main(*sys.argv[1:])
