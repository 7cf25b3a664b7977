"""Record the launches of a kernel's first call, and repeat them on the tensors of later calls.

A pass of a kernel derives tables, configurations, TMA descriptors and constants from its inputs, which takes longer on
the host than a short attention takes on the GPU. All of it is the same in a later call with tensors of the same shapes
and strides: only addresses differ. So the launch code runs once, through a `Launcher` that notes each launch, buffer
and copy. A `Replay` repeats them: it allocates one workspace, writes addresses into packed arguments and launches.

A call that cannot be repeated safely runs the launch code again: while a graph is captured, on a CPU, for arguments
that point neither into the caller's tensors nor into buffers of the launcher, and where Triton is not as expected.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshflash.kernels import prepared_launch
from meshflash.kernels.prepared_launch import CONSTANT, WORKSPACE, Address

#: Replays of one piece of launch code: one for each combination of strides and streams. Then the oldest is dropped.
MAX_REPLAYS = 16
#: Bytes: buffers begin at multiples of this in the workspace, as torch's allocator aligns tensors.
BUFFER_ALIGNMENT = 512
#: Triton specializes kernels for addresses that are multiples of this many bytes.
POINTER_ALIGNMENT = 16

#: Numbers that differ between calls, by the name of the kernels' parameter: a seed, or an epoch.
Numbers = Mapping[str, int]
_NO_NUMBERS: Numbers = {}


class _Buffer(NamedTuple):
    """A buffer of the launch code: its tensor in the recorded call, and where it begins in the workspace of replays."""

    tensor: Tensor
    offset: int


#: A recorded operation: it gets the addresses of all tensors, the stream, the tensors, and the numbers of a call.
_Operation = Callable[[list[int], int, Sequence[Tensor], Numbers], object]


class Launcher:
    """Runs the launches of one call; launch code gets one, and makes its results, buffers and copies through it.

    Args:
        inputs: The tensors that the call was given: everything that its launches read, or write besides results. None
            of the launches is recorded if this is None.
        numbers: The numbers that differ between calls.
    """

    def __init__(self, inputs: Sequence[Tensor] | None = None, numbers: Numbers = _NO_NUMBERS) -> None:
        self._inputs, self._numbers = inputs, numbers
        self._recorded = inputs is not None and prepared_launch.has_driver()
        self._operations: list[_Operation] = []
        self._results: list[Tensor] = []
        self._buffers: list[_Buffer] = []
        self._constants: list[Tensor] = []
        self._bytes = 0

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Launch a Triton or Gluon kernel on the current stream of the current device.

        Args:
            kernel: The kernel.
            grid: The number of CTAs along each axis.
            arguments: The arguments in the order of the kernel's parameters.
            constants: The constexprs and launch options by name.
        """
        # Error bounds and speed assume that x * y + z is one instruction. From Triton 3.10 on that must be requested.
        # Triton's interpreter keeps the grid of a launch in a variable of its own: one launch at a time
        with _interpreter_lock if type(kernel).__name__ == "InterpretedFunction" else _NO_CONTEXT:
            compiled = kernel[tuple(grid)](*arguments, enable_fp_fusion=True, **constants)
        if self._recorded and 0 not in grid:
            prepared = prepared_launch.prepare(compiled, grid, arguments, self._locate, self._numbers)
            if prepared is None:
                self._recorded = False
            else:
                self._operations.append(prepared)

    def result(self, *shape: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new contiguous tensor that the call returns. Replays return new ones in the same order.

        Args:
            shape: The sizes of the tensor.
            like: A tensor on the same device.
            dtype: The dtype of the tensor; by default that of `like`.
        """
        result = torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
        self._results.append(result)
        return result

    def empty(self, *shape: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a buffer for the time of the call, on the device of `like`.

        Args:
            shape: The sizes of the buffer.
            like: A tensor on the same device.
            dtype: The dtype of the buffer.
        """
        buffer = torch.empty(shape, dtype=dtype, device=like.device)
        if self._recorded:
            self._buffers.append(_Buffer(buffer, self._bytes))
            self._bytes += -(-buffer.nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        return buffer

    def zeros(self, *shape: int, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a buffer of zeros for the time of the call, on the device of `like`.

        Args:
            shape: The sizes of the buffer.
            like: A tensor on the same device.
            dtype: The dtype of the buffer, of 4 bytes an element.
        """
        buffer = self.empty(*shape, like=like, dtype=dtype).zero_()
        if self._recorded and buffer.nbytes:
            address = Address(WORKSPACE, self._buffers[-1].offset)
            self._operations.append(prepared_launch.fill_with_zeros(address, buffer.nbytes // 4))
        return buffer

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy a tensor into another one of the same shape.

        Args:
            into: The tensor to write: an input or a result.
            source: The tensor to read: an input, a result, or a buffer of this launcher or a contiguous part of one.
        """
        into.copy_(source)
        if self._recorded and into.numel():
            targets, sources = ([n for n, x in enumerate(self._tensors) if x is y] for y in (into, source))
            offset = self._workspace_offset(source) if source.is_contiguous() else None
            if targets and sources:
                self._operations.append(_copy(targets[0], sources[0]))
            elif targets and offset is not None:
                self._operations.append(_copy_from_workspace(targets[0], source, offset))
            else:
                self._recorded = False

    def keep(self, *tensors: Tensor) -> None:
        """Allow arguments that point into these tensors; replays use the same ones and keep them alive.

        Args:
            tensors: Tensors that hold the same in every call, such as tables.
        """
        self._constants.extend(tensors)

    def replay(self, stream: int) -> Replay | None:
        """Return a repetition of what was launched, or None where that is not possible.

        Args:
            stream: The stream of the launches. Replays run on the same one: tile counters belong to a stream.
        """
        if not self._recorded or not self._inputs or not self._operations:
            return None
        return Replay(self._operations, self._inputs, self._results, self._bytes, self._constants, stream)

    @property
    def _tensors(self) -> list[Tensor]:
        return [*(self._inputs or ()), *self._results]

    def _locate(self, x: Tensor) -> Address | None:
        """Return what an argument points to: an input, a result, the workspace, or memory that stays."""
        address = x.data_ptr()
        for n, tensor in enumerate(self._tensors):
            if tensor.data_ptr() == address:
                return Address(n, 0)
        offset = self._workspace_offset(x)
        if offset is not None:
            return Address(WORKSPACE, offset)
        for constant in self._constants:
            if 0 <= address - constant.data_ptr() < constant.nbytes:
                return Address(CONSTANT, address)
        for n, tensor in enumerate(self._tensors):
            if 0 <= address - tensor.data_ptr() < _extent(tensor):
                return Address(n, address - tensor.data_ptr())
        return None

    def _workspace_offset(self, x: Tensor) -> int | None:
        """Return where a tensor begins in the workspace of replays, or None where it is in none of the buffers."""
        for buffer in self._buffers:
            distance = x.data_ptr() - buffer.tensor.data_ptr()
            if 0 <= distance < buffer.tensor.nbytes:
                return buffer.offset + distance
        return None


def _copy(target: int, source: int) -> _Operation:
    return lambda _, __, tensors, ___: tensors[target].copy_(tensors[source])


def _copy_from_workspace(target: int, source: Tensor, begin: int) -> _Operation:
    end, dtype, shape = begin + source.nbytes, source.dtype, source.shape
    return lambda _, __, tensors, ___: tensors[target].copy_(tensors[-1][begin:end].view(dtype).view(shape))


class Replay:
    """The launches of a recorded call, repeated on other tensors. A `Launcher` makes one.

    Args:
        operations: The recorded operations.
        inputs: The inputs of the recorded call.
        results: The results of the recorded call.
        workspace_bytes: The bytes of all its buffers.
        constants: Tensors that must stay alive as long as the replay.
        stream: The stream of the launches.
    """

    def __init__(
        self,
        operations: Sequence[_Operation],
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        workspace_bytes: int,
        constants: Sequence[Tensor],
        stream: int,
    ) -> None:
        self._operations, self._bytes, self._constants, self._stream = operations, workspace_bytes, constants, stream
        self._device, self._index = inputs[0].device, inputs[0].get_device()
        self._strides = [x.stride() for x in inputs]
        # the fastest way to allocate is like another tensor; expanded ones take no memory
        self._like = [x.new_empty(1).expand(x.shape) for x in results]
        addresses = [x.data_ptr() for x in inputs]
        # kernels are specialized by alignment
        self._alignment = [address % POINTER_ALIGNMENT for address in addresses]
        self._is_aligned = not any(self._alignment)
        # Where tensors overlap, as q, k and v of one projection do, an address inside of both may have been taken for
        # the wrong one of them. Replay only if their distances are unchanged: then both give the same address.
        ends = [address + _extent(x) for address, x in zip(addresses, inputs, strict=True)]
        self._distances = [
            (i, j, addresses[j] - addresses[i])
            for i in range(len(inputs))
            for j in range(i)
            if addresses[i] < ends[j] and addresses[j] < ends[i]
        ]

    def __call__(self, inputs: Sequence[Tensor], numbers: Numbers) -> list[Tensor] | None:
        """Launch everything on these tensors and return the results; None where strides, alignment or stream differ.

        Args:
            inputs: The inputs of a call, with the shapes and dtypes of the recorded one.
            numbers: The numbers of the call.
        """
        if [x.stride() for x in inputs] != self._strides or not prepared_launch.may_replay(self._index, self._stream):
            return None
        addresses = [x.data_ptr() for x in inputs]
        if self._is_aligned:
            bits = 0
            for address in addresses:
                bits |= address
            if bits % POINTER_ALIGNMENT:
                return None
        elif [address % POINTER_ALIGNMENT for address in addresses] != self._alignment:
            return None
        for i, j, distance in self._distances:
            if addresses[j] - addresses[i] != distance:
                return None
        results = [torch.empty_like(x) for x in self._like]
        for result in results:
            addresses.append(result.data_ptr())
        tensors = [*inputs, *results]
        if self._bytes:
            workspace = torch.empty(self._bytes, dtype=torch.uint8, device=self._device)
            addresses.append(workspace.data_ptr())
            tensors.append(workspace)
        for operation in self._operations:
            operation(addresses, self._stream, tensors, numbers)
        return results


#: Launch code: it launches everything through a launcher, and returns the launcher's results, if it has any.
Launch = Callable[[Launcher], Sequence[Tensor] | None]


class Launches:
    """The recorded launches of calls that are equal but for addresses, strides and numbers.

    Executables own them. Shapes and dtypes are not compared: they must be those of the executable, or in the name.
    """

    def __init__(self) -> None:
        self._replays: dict[Any, list[Replay]] = {}
        #: What cannot be repeated is not recorded again.
        self._refused: set[Any] = set()

    def run(
        self, name: Any, inputs: Sequence[Tensor], launch: Launch, numbers: Numbers = _NO_NUMBERS
    ) -> Sequence[Tensor]:
        """Repeat recorded launches on these tensors, or run the launch code and record it; return the results.

        Args:
            name: What identifies the launch code, besides the strides of the inputs.
            inputs: The tensors of the call: everything that its launches read, or write besides results.
            launch: The launch code.
            numbers: The numbers that differ between calls, by the name of the kernels' parameter.
        """
        results: Sequence[Tensor] | None = self.repeat(name, inputs, numbers)
        if results is not None:
            return results
        index = inputs[0].get_device()
        if inputs[0].is_cuda and torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self.run(name, inputs, launch, numbers)
        return self._record(name, inputs, launch, numbers)

    def repeat(self, name: Any, inputs: Sequence[Tensor], numbers: Numbers = _NO_NUMBERS) -> list[Tensor] | None:
        """Repeat recorded launches on these tensors and return the results, or None where none fits.

        Args:
            name: What identifies the launch code, besides the strides of the inputs.
            inputs: The tensors of the call.
            numbers: The numbers that differ between calls, by the name of the kernels' parameter.
        """
        if numbers:
            name = _with_widths(name, numbers)
        for replay in self._replays.get(name, ()):
            results = replay(inputs, numbers)
            if results is not None:
                return results
        return None

    def _record(self, name: Any, inputs: Sequence[Tensor], launch: Launch, numbers: Numbers) -> Sequence[Tensor]:
        if numbers:
            name = _with_widths(name, numbers)
        strides = name, *(x.stride() for x in inputs)
        may_record = inputs[0].is_cuda and not (torch.cuda.is_current_stream_capturing() or prepared_launch.has_hooks())
        if not may_record or strides in self._refused:
            return launch(Launcher()) or ()
        stream = torch.cuda.current_stream().cuda_stream
        launcher = Launcher(inputs, numbers)
        results = launch(launcher) or ()
        replay = launcher.replay(stream)
        if replay is not None:
            self._replays[name] = [replay, *self._replays.get(name, ())][:MAX_REPLAYS]
        elif len(self._refused) < MAX_REPLAYS:
            self._refused.add(strides)
        return results


def _with_widths(name: Any, numbers: Numbers) -> Any:
    """Return a name that also tells which numbers need 64 bits: Triton passes small integers in 32 bits."""
    return name, *(value < 2**31 for value in numbers.values())


def run(
    launches: Launches | None, name: Any, inputs: Sequence[Tensor], launch: Launch, numbers: Numbers = _NO_NUMBERS
) -> Sequence[Tensor]:
    """Run launch code, through recorded launches where the caller keeps some, and return its results.

    Args:
        launches: The recorded launches, or None.
        name: What identifies the launch code.
        inputs: The tensors of the call: everything that its launches read, or write besides results.
        launch: The launch code.
        numbers: The numbers that differ between calls, by the name of the kernels' parameter.
    """
    if launches is not None:
        return launches.run(name, inputs, launch, numbers)
    with torch.cuda.device_of(inputs[0]):
        return launch(Launcher()) or ()


_NO_CONTEXT = nullcontext()
_interpreter_lock = threading.Lock()


def _renew_lock() -> None:
    """Make a new lock in a forked child: a thread of the parent may have held the old one."""
    global _interpreter_lock
    _interpreter_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _extent(x: Tensor) -> int:
    """Return the bytes from the first to the end of the last element of a tensor."""
    if not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()
