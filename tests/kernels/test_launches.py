"""Recorded launches are repeated on other tensors exactly where that is safe. The CUDA driver is a fake."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshflash.kernels import prepared_launch
from meshflash.kernels.launches import Launcher, Launches, run

STREAM = 7
#: (name, Triton's type, PTX parameter) of the fake kernel's parameters; the last two are Triton's scratch.
PARAMETERS = (
    ("X", "*fp32", ".u64"),
    ("OUT", "*fp32", ".u64"),
    ("BUFFER", "*fp32", ".u64"),
    ("TABLE", "*i32", ".u64"),
    ("n", "i32", ".u32"),
    ("scale", "fp32", ".f32"),
    ("seed", "i64", ".u64"),
    ("BLOCK", "constexpr", ""),
    ("", "", ".u64"),
    ("", "", ".u64"),
)


class FakeDriver:
    """Records what is launched: the values of all parameters, read as the GPU would read them."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []
        self.filled: list[tuple[int, int]] = []
        self.replaced: list[tuple[int, int]] = []

    def launch(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        found = {"function": function.value, "grid": tuple(config._obj.grid), "stream": config._obj.stream}
        kinds = [(name, kind) for name, kind, _ in PARAMETERS if name and kind != "constexpr"]
        for (name, kind), address in zip(kinds, params, strict=False):
            code = {"i32": "<i", "fp32": "<f", "i64": "<q"}.get(kind, "<Q")
            (found[name],) = struct.unpack(code, ctypes.string_at(address, struct.calcsize(code)))
        self.launched.append(found)
        return 0

    def fill(self, address: int, value: int, words: int, stream: int) -> int:
        assert (value, stream) == (0, STREAM)
        self.filled.append((address, words))
        return 0

    def replace_address(self, descriptor: int, address: int) -> int:
        self.replaced.append((descriptor, address))
        return 0

    def check(self, status: int) -> None:
        assert not status


class FakeKernel:
    """A kernel whose ordinary launch does nothing, and returns what Triton compiles."""

    def __init__(self, parameters: tuple[tuple[str, str, str], ...] = PARAMETERS, scratch: int = 0) -> None:
        entry = ", ".join(f".param {ptx} f_{n}" for n, (_, _, ptx) in enumerate(parameters) if ptx)
        self.ordinary = 0
        metadata = dict(num_ctas=1, num_warps=4, shared=0, launch_pdl=False, launch_cooperative_grid=False)
        self.compiled = SimpleNamespace(
            function=99,
            asm={"ptx": f".visible .entry f({entry})"},
            metadata=SimpleNamespace(
                **metadata, global_scratch_size=scratch, profile_scratch_size=0, tensordesc_meta=None
            ),
            src=SimpleNamespace(signature={name: kind for name, kind, _ in parameters if name}),
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.ordinary += 1
            return self.compiled

        return launch


@pytest.fixture
def driver(monkeypatch):
    """A fake CUDA driver, on which CPU tensors count as those of device -1."""
    fake = FakeDriver()
    monkeypatch.setattr(prepared_launch, "_driver", lambda: fake)
    monkeypatch.setattr(prepared_launch, "_get_device", lambda: -1)
    monkeypatch.setattr(prepared_launch, "_get_stream", lambda device: STREAM)
    monkeypatch.setattr(prepared_launch, "_is_capturing", lambda: False)
    monkeypatch.setattr(prepared_launch, "has_hooks", lambda: False)
    return fake


TABLE = torch.arange(4, dtype=torch.int32)


def launch_code(kernel, x, launcher, buffer_of=None):
    """Launch code with a result, a buffer and a table."""
    out = launcher.result(4, 8, like=x)
    buffer = launcher.zeros(4, 8, like=x) if buffer_of is None else buffer_of
    launcher.keep(TABLE)
    launcher.launch(kernel, (3, 2), x, out, buffer, TABLE, 5, 0.5, 11, BLOCK=16, num_warps=4)
    return [out]


def record(x, kernel=None, numbers=None, **more):
    """Record a call and return its replay."""
    launcher = Launcher([x], numbers or {})
    launch_code(kernel or FakeKernel(), x, launcher, **more)
    return launcher.replay(STREAM)


def replay_of(launcher: Launcher) -> Any:
    """Return the replay of what a launcher recorded."""
    replay = launcher.replay(STREAM)
    assert replay is not None
    return replay


def test_replay_launches_on_the_addresses_of_its_own_call(driver):
    replay = record(torch.zeros(4, 8), numbers={"seed": 11})
    x = torch.zeros(4, 8)
    for seed in (3, 4):
        (out,) = replay([x], {"seed": seed})
        found = driver.launched[-1]
        assert out.shape == (4, 8)
        assert out.is_contiguous()
        assert (found["X"], found["OUT"], found["TABLE"]) == (x.data_ptr(), out.data_ptr(), TABLE.data_ptr())
        assert (found["n"], found["scale"], found["seed"]) == (5, 0.5, seed)
        assert (found["function"], found["grid"], found["stream"]) == (99, (3, 2, 1), STREAM)
        # the buffer is in a workspace of the call, which is filled with zeros before
        assert driver.filled[-1] == (found["BUFFER"], 32)


def test_replay_does_not_run_the_launch_code(driver):
    kernel = FakeKernel()
    replay = record(torch.zeros(4, 8), kernel)
    for _ in range(3):
        replay([torch.zeros(4, 8)], {})
    assert kernel.ordinary == 1
    assert len(driver.launched) == 3


def test_replay_keeps_no_tensor_of_the_recorded_call(driver):
    import weakref

    x = torch.zeros(4, 8)
    dropped = weakref.ref(x)
    replay = record(x)
    del x
    assert dropped() is None
    assert replay is not None


@pytest.mark.parametrize(
    "x",
    [torch.zeros(8, 4).T, torch.zeros(4 * 8 + 1)[1:].view(4, 8)],
    ids=["strides", "alignment"],
)
def test_replay_refuses_other_strides_and_alignment(driver, x):
    assert record(torch.zeros(4, 8))([x], {}) is None
    assert not driver.launched


def test_replay_serves_the_alignment_that_it_was_recorded_with(driver):
    x = torch.zeros(4 * 8 + 1)[1:].view(4, 8)
    assert record(x)([torch.zeros(4 * 8 + 1)[1:].view(4, 8)], {}) is not None


@pytest.mark.parametrize("what", ["_get_device", "_get_stream", "_is_capturing", "has_hooks"])
def test_replay_refuses_another_device_or_stream_and_captures_and_profilers(driver, monkeypatch, what):
    replay = record(torch.zeros(4, 8))
    value = {"_get_device": lambda: 1, "_get_stream": lambda device: 8}.get(what, lambda: True)
    monkeypatch.setattr(prepared_launch, what, value)
    assert replay([torch.zeros(4, 8)], {}) is None


def test_inputs_that_overlap_must_lie_the_same_way(driver):
    """A view of one of them may have been taken for a view of the other."""
    packed = torch.zeros(4, 24)
    launcher = Launcher([packed[:, :8], packed[:, 8:16]])
    launch_code(FakeKernel(), packed[:, :8], launcher, buffer_of=packed[:, 8:16])
    replay = replay_of(launcher)
    other = torch.zeros(4, 24)
    assert replay([other[:, :8], other[:, 8:16]], {}) is not None
    assert driver.launched[-1]["BUFFER"] == other[:, 8:16].data_ptr()
    assert replay([other[:, :8], other[:, 16:]], {}) is None
    assert replay([other[:, :8], torch.zeros(4, 24)[:, 8:16]], {}) is None


def test_one_tensor_given_twice_is_not_taken_for_two(driver):
    x = torch.zeros(4, 8)
    launcher = Launcher([x, x])
    launch_code(FakeKernel(), x, launcher, buffer_of=x)
    replay = replay_of(launcher)
    assert replay([torch.zeros(4, 8), torch.zeros(4, 8)], {}) is None
    assert replay([x, x], {}) is not None


def test_views_follow_their_tensor(driver):
    x = torch.zeros(4, 8)
    launcher = Launcher([x])
    launch_code(FakeKernel(), x, launcher, buffer_of=x[2:])
    other = torch.zeros(4, 8)
    assert replay_of(launcher)([other], {}) is not None
    assert driver.launched[-1]["BUFFER"] == other[2:].data_ptr()


@pytest.mark.parametrize(
    ("kernel", "buffer"),
    [
        (FakeKernel(), torch.zeros(4, 8)),
        (FakeKernel(scratch=8), None),
        (FakeKernel(PARAMETERS[:-1]), None),
        (FakeKernel(tuple((n, "<unknown>" if n == "n" else k, p) for n, k, p in PARAMETERS)), None),
    ],
    ids=["memory that nobody owns", "scratch of Triton", "other parameters in PTX", "unknown type"],
)
def test_what_cannot_be_repeated_safely_is_not_recorded(driver, kernel, buffer):
    assert record(torch.zeros(4, 8), kernel, buffer_of=buffer) is None


def test_without_a_cuda_driver_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(prepared_launch, "_driver", lambda: None)
    assert record(torch.zeros(4, 8), buffer_of=TABLE) is None


def test_copies_are_repeated(driver):
    """From a part of a buffer in the workspace, and from an input."""
    x = torch.randn(4, 8)
    launcher = Launcher([x])
    launcher.empty(3, like=x, dtype=torch.float32)  # another buffer before it
    out, buffer = launcher.result(4, 8, like=x), launcher.empty(2, 4, 8, like=x, dtype=torch.float64)
    second = buffer[1]
    launcher.launch(FakeKernel(), (1,), x, out, second, x, 5, 0.5, 11, BLOCK=16)
    buffer[0], buffer[1] = 1.0, 2.0
    launcher.copy(out, second)
    assert torch.equal(out, torch.full((4, 8), 2.0))
    both = launcher.result(4, 8, like=x)
    launcher.copy(both, x)
    replay = replay_of(launcher)
    other = torch.randn(4, 8)

    def write_buffer(config: Any, function: Any, params: Any, extra: Any) -> int:
        address = ctypes.c_uint64.from_address(params[2]).value
        ctypes.memmove(address, torch.full((32,), 3.0, dtype=torch.float64).numpy().tobytes(), 256)
        return 0

    driver.launch = write_buffer
    out, both = replay([other], {})
    assert torch.equal(out, torch.full((4, 8), 3.0))
    assert torch.equal(both, other)


def test_copy_of_an_unknown_tensor_is_not_recorded(driver):
    x = torch.zeros(4, 8)
    launcher = Launcher([x])
    launch_code(FakeKernel(), x, launcher)
    launcher.copy(x, torch.ones(4, 8))
    assert launcher.replay(STREAM) is None


def test_copy_of_scattered_rows_of_a_buffer_is_not_recorded(driver):
    x = torch.zeros(4, 8)
    launcher = Launcher([x])
    launch_code(FakeKernel(), x, launcher)
    launcher.copy(x, launcher.zeros(4, 16, like=x)[:, ::2])
    assert launcher.replay(STREAM) is None


def test_descriptors_follow_their_tensor_and_are_rewritten_only_if_it_moved(driver, monkeypatch):
    kinds = (("A", "tensordesc<fp32[16]>", ".align 64 .b8"), *PARAMETERS[:1], *PARAMETERS[-2:])
    kernel = FakeKernel(kinds)
    ptx = ".entry f(.param .align 64 .b8 f_0[128], .param .u32 f_1, .param .u64 f_2, .param .u64 f_3, "
    kernel.compiled.asm["ptx"] = ptx + ".param .u64 f_4, .param .u64 f_5)"
    kernel.compiled.metadata.tensordesc_meta = [{}]
    monkeypatch.setattr(prepared_launch, "_encode_descriptor", lambda *_: (bytes(128), [8], [1]))
    driver.launch = lambda *_: 0
    x, y = torch.zeros(8), torch.zeros(8)
    launcher = Launcher([x, y])
    launcher.launch(kernel, (1,), SimpleNamespace(base=x), y)
    replay = replay_of(launcher)
    replay([x, y], {})
    replay([x, torch.zeros(8)], {})
    assert [address for _, address in driver.replaced] == [x.data_ptr()]
    moved = torch.zeros(8)
    replay([moved, y], {})
    assert driver.replaced[-1][1] == moved.data_ptr()
    assert driver.replaced[-1][0] % 64 == 0


def test_launches_on_a_cpu_run_the_launch_code_each_time():
    kernel, launches, x = FakeKernel(), Launches(), torch.zeros(4, 8)
    for _ in range(2):
        (out,) = launches.run("f", [x], lambda launcher: launch_code(kernel, x, launcher))
        assert out.shape == (4, 8)
    run(None, "f", [x], lambda launcher: launch_code(kernel, x, launcher))
    assert kernel.ordinary == 3


def test_hooks_of_a_profiler_are_seen():
    triton = pytest.importorskip("triton")
    assert not prepared_launch.has_hooks()
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        assert prepared_launch.has_hooks()
    finally:
        hook.remove(print)
    assert not prepared_launch.has_hooks()


def test_buffers_of_zeros_need_no_driver(monkeypatch):
    """An AMD GPU has none, and a backward makes its buffers before its first launch."""
    monkeypatch.setattr(prepared_launch, "_driver", lambda: None)
    x = torch.zeros(4, 8)
    launcher = Launcher([x])
    assert not launcher.zeros(4, 8, like=x).any()
    assert launcher.replay(STREAM) is None


def test_empty_buffers_and_grids_are_repeated(driver):
    x = torch.zeros(4, 8)
    launcher = Launcher([x])
    launch_code(FakeKernel(), x, launcher, buffer_of=x)
    empty = launcher.empty(0, 8, like=x, dtype=torch.float32)
    launcher.copy(launcher.result(0, 8, like=x), empty)
    launcher.launch(FakeKernel(), (0, 2), x, x, x, TABLE, 5, 0.5, 11, BLOCK=16)
    both = launcher.result(4, 8, like=x)
    launcher.copy(both, x)
    other = torch.randn(4, 8)
    _, _, copied = replay_of(launcher)([other], {})
    assert torch.equal(copied, other)
    assert len(driver.launched) == 1


def test_every_launch_requests_fused_multiply_add():
    given = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: given.update(constants)

    Launcher().launch(Kernel(), (1,), BLOCK=4)
    assert given == {"enable_fp_fusion": True, "BLOCK": 4}
