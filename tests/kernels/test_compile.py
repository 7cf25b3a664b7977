"""Every configuration that comes with meshflash, compiled for GPUs that are not here: it fits them, and stays as
good as it is. What a bound was when it was set is the compiler's of the pinned Triton; another may shift it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from cross import TARGETS, TENSOR_MEMORY, Built, Call, compiled, missing

pytest.importorskip("triton")

Started = dict[str, "Future[dict[Call, list[Built] | str]]"]

#: One split in two among them: 96 = 64 + 32.
DIMS = (64, 96, 128, 256)
ATTENTION = ("forward", "backward", "deterministic")
CALLS = (
    *(Call(kind, dim) for dim in DIMS for kind in (*ATTENTION, "rows")),
    *(Call(kind, 128, "float16") for kind in ("forward", "backward")),
    *(Call(kind, 64, "float32") for kind in (*ATTENTION, "rows")),
    *(Call(kind, 64, features=True) for kind in ATTENTION),
    *(Call(kind, 128, aligned=False) for kind in ATTENTION),
)
FEW: Mapping[str, Sequence[Call]] = {
    "sm_90": (Call("forward", 128), Call("backward", 128)),
    "gfx942": (Call("forward", 64),),
}
ALL: Mapping[str, Sequence[Call]] = dict.fromkeys(("sm_100", "sm_90", "gfx942", "sm_80"), CALLS)

#: Bytes that a thread may spill where no more is said: some numbers of a span, outside of the loops.
SPILLED = 64
#: (target, call, kernel) -> bytes that it may spill; a tenth above what it does.
SPILLS: dict[tuple[str, str, str], int] = {}
#: (target, call) that does not fit, and why.
UNFIT: dict[tuple[str, str], str] = {}


def started(work: Mapping[str, Sequence[Call]]) -> Iterator[Started]:
    """Compile in two processes at a time, one for each target."""
    with ThreadPoolExecutor(2) as pool:
        yield {target: pool.submit(compiled, target, calls) for target, calls in work.items() if not missing(target)}


@pytest.fixture(scope="module")
def few() -> Iterator[Started]:
    yield from started(FEW)


@pytest.fixture(scope="module")
def every() -> Iterator[Started]:
    yield from started(ALL)


def kernels(compilations: Started, target: str, call: Call) -> list[Built]:
    if target not in compilations:
        pytest.skip(f"no {missing(target)} here")
    built = compilations[target].result()[call]
    assert not isinstance(built, str), built
    assert built
    return built


def check(built: list[Built], target: str, call: Call) -> None:
    limits = TARGETS[target]
    for kernel in built:
        assert kernel.shared <= limits.shared, kernel
        assert kernel.tensor_memory <= TENSOR_MEMORY, kernel
        assert kernel.registers <= limits.registers, kernel
        assert kernel.spilled <= SPILLS.get((target, str(call), kernel.kernel), SPILLED), kernel
        assert not kernel.serialized, kernel


def cases(work: Mapping[str, Sequence[Call]]) -> list[object]:
    return [case(target, call) for target, calls in work.items() for call in calls]


def case(target: str, call: Call) -> object:
    reason = UNFIT.get((target, str(call)))
    marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
    return pytest.param(target, call, id=f"{target} {call}", marks=marks)


@pytest.mark.parametrize(("target", "call"), cases(FEW))
def test_a_few_fit(few, target, call):
    check(kernels(few, target, call), target, call)


def test_hot_loop_of_forward_stays_in_registers(few):
    (forward,) = kernels(few, "sm_90", Call("forward", 128))
    assert forward.local == 0


@pytest.mark.slow
@pytest.mark.parametrize(("target", "call"), cases(ALL))
def test_every_configuration_fits(every, target, call):
    check(kernels(every, target, call), target, call)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_hot_loops_of_forward_stay_in_registers(every, dim):
    (forward,) = kernels(every, "sm_90", Call("forward", dim))
    assert forward.local == 0
