"""Launch a compiled Triton kernel again without Triton: its arguments stay packed, and only addresses change.

`JITFunction.run` binds and hashes every argument and encodes every TMA descriptor in each call, which takes longer on
the host than a short attention takes on the GPU. A `PreparedLaunch` is made from the arguments of one ordinary launch.
It keeps the kernel's parameters in memory of its own, writes the addresses of a call into them, and calls
`cuLaunchKernelEx` of the CUDA driver. `launches.py` decides when that is safe.

This is the only module that reads private parts of Triton: the compiled kernel's `function`, `metadata`, `asm` and
`src.signature`, and the encoder of TMA descriptors. They are the same in Triton 3.6 to 3.9. Where anything is not as
expected, `prepare` returns None, and callers keep to the ordinary launch.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Bytes of a CUtensorMap, the TMA descriptor of the CUDA driver.
DESCRIPTOR_BYTES = 128
#: Triton's Python object of a descriptor: a header, and from this byte on the CUtensorMap.
_DESCRIPTOR_OFFSET = 128
#: Bytes: what the driver asks of a CUtensorMap is 64, and kernels read it fastest from a line of its own.
DESCRIPTOR_ALIGNMENT = 128
#: The kind of a parameter that is a TMA descriptor.
DESCRIPTOR = "nvTmaDesc"

_CLUSTER_DIMENSION, _CLUSTER_SCHEDULING, _COOPERATIVE, _SERIALIZATION = 4, 5, 2, 6
_FORMATS = {"i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<B", "u8": "<B", "u16": "<H",
            "u32": "<I", "u64": "<Q", "fp32": "<f", "fp64": "<d"}  # fmt: skip


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Driver:
    """The calls of the CUDA driver that a launch needs. They release the GIL: a launch waits for a full queue."""

    def __init__(self) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        self.launch = cuda.cuLaunchKernelEx
        self.replace_address = cuda.cuTensorMapReplaceAddress
        self.replace_address.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self.fill = cuda.cuMemsetD32Async
        self.fill.argtypes = (ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p)
        self._error_text = cuda.cuGetErrorString

    def check(self, status: int) -> None:
        """Raise RuntimeError unless a call succeeded.

        Args:
            status: The CUresult that the call returned.
        """
        if status:
            text = ctypes.c_char_p()
            self._error_text(status, ctypes.byref(text))
            raise RuntimeError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")


def has_driver() -> bool:
    """Return whether there is a CUDA driver with the calls of `Driver`."""
    return _driver() is not None


@cache
def _driver() -> Driver | None:
    try:
        return Driver()
    except (OSError, AttributeError):  # no CUDA driver, or one older than CUDA 12
        return None


#: Roles of an address besides the numbers of a call's tensors: the workspace, which is the last one of these, and
#: memory that stays.
WORKSPACE, CONSTANT = -1, -2


class Address(NamedTuple):
    """Where an argument points to: `offset` bytes into tensor number `role` of a call, or with CONSTANT to `offset`."""

    role: int
    offset: int


class _Pointer(NamedTuple):
    """A pointer among the parameters: the memory that holds it, and what it points to."""

    slot: ctypes.c_uint64
    role: int
    offset: int


class _Descriptor(NamedTuple):
    """A TMA descriptor among the parameters: its own address, and what it describes."""

    at: int
    role: int
    offset: int


class PreparedLaunch:
    """A compiled kernel with packed arguments. `prepare` makes one, and a replay of a call owns it.

    A call writes the addresses of its tensors into the arguments, and its numbers. All other arguments keep their
    value.

    Args:
        driver: The CUDA driver.
        compiled: The compiled kernel.
        grid: The number of CTAs along each axis.
        parameters: The parameters of the kernel.
    """

    def __init__(self, driver: Driver, compiled: Any, grid: Sequence[int], parameters: Sequence[Parameter]) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        sizes = [_size(x.kind) for x in parameters]
        offsets = _offsets(sizes, [DESCRIPTOR_ALIGNMENT if x.kind == DESCRIPTOR else 8 for x in parameters])
        self._memory = ctypes.create_string_buffer(offsets[-1] + sizes[-1] + DESCRIPTOR_ALIGNMENT)
        start = -ctypes.addressof(self._memory) % DESCRIPTOR_ALIGNMENT
        base = ctypes.addressof(self._memory) + start
        self._params = (ctypes.c_void_p * len(parameters))(*(base + offset for offset in offsets))
        self._pointers: list[_Pointer] = []
        self._descriptors: list[_Descriptor] = []
        self._numbers: list[tuple[str, str, int]] = []
        for x, offset in zip(parameters, offsets, strict=True):
            address = base + offset
            role, distance = x.points_to or (CONSTANT, 0)
            if x.kind == DESCRIPTOR:
                ctypes.memmove(address, x.value, DESCRIPTOR_BYTES)
                if role != CONSTANT:
                    self._descriptors.append(_Descriptor(address, role, distance))
            elif x.kind.startswith("*"):
                slot = ctypes.c_uint64.from_address(address)
                slot.value = x.value
                if role != CONSTANT:
                    self._pointers.append(_Pointer(slot, role, distance))
            else:
                _write_number(address, x.kind, x.value)
                if x.number:
                    self._numbers.append((x.number, x.kind, address))
        self._addresses: list[int] = []
        self._compiled = compiled  # owns the function
        self._function = ctypes.c_void_p(compiled.function)
        metadata = compiled.metadata
        self._attributes = _attributes(metadata)
        x_ctas, y_ctas, z_ctas = (*grid, 1, 1)[:3]
        self._config = _Config(
            (ctypes.c_uint * 3)(x_ctas * metadata.num_ctas, y_ctas, z_ctas),
            (ctypes.c_uint * 3)(32 * metadata.num_warps, 1, 1),
            metadata.shared,
            None,
            self._attributes,
            len(self._attributes),
        )
        self._config_pointer = ctypes.byref(self._config)

    def __call__(self, addresses: list[int], stream: int, _: Any, numbers: Mapping[str, int]) -> None:
        """Launch the kernel.

        Args:
            addresses: The addresses of the call's tensors, by role.
            stream: The CUDA stream, as an integer handle.
            numbers: The numbers of the call, by the name of the kernel's parameter.
        """
        with self._lock:  # the driver copies the parameters before it returns
            before = self._addresses
            if addresses != before:
                self._addresses = []  # until all are written
                for slot, role, offset in self._pointers:
                    slot.value = addresses[role] + offset
                for at, role, offset in self._descriptors:
                    if not before or addresses[role] != before[role]:
                        self._driver.check(self._driver.replace_address(at, addresses[role] + offset))
                self._addresses = addresses
            for name, kind, address in self._numbers:
                _write_number(address, kind, numbers[name])
            self._config.stream = stream
            status = self._driver.launch(self._config_pointer, self._function, self._params, None)
        if status:
            self._driver.check(status)


class Parameter(NamedTuple):
    """One parameter of a compiled kernel.

    `kind` is Triton's name of its type, or DESCRIPTOR. `points_to` says which tensor of a call a pointer or descriptor
    follows, and `number` which number of a call.
    """

    kind: str
    value: Any
    points_to: Address | None = None
    number: str = ""


def prepare(
    compiled: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    locate: Callable[[Tensor], Address | None],
    numbers: Container[str] = (),
) -> PreparedLaunch | None:
    """Return a launch that repeats an ordinary one on other addresses, or None where that is not possible.

    Args:
        compiled: The compiled kernel, as the ordinary launch returned it.
        grid: The number of CTAs along each axis.
        arguments: The arguments before the constexprs, in the order of the kernel's parameters.
        locate: Returns what a tensor among the arguments points to, or None where nobody knows.
        numbers: The names of parameters whose number differs between calls.
    """
    driver = _driver()
    if driver is None or not getattr(compiled, "function", None) or "ptx" not in compiled.asm:
        return None  # an interpreter, an AMD GPU, or no CUDA driver
    if compiled.metadata.global_scratch_size or compiled.metadata.profile_scratch_size or has_hooks():
        return None  # the ordinary launch allocates these, and calls the hooks
    parameters = _parameters(compiled, arguments, locate, numbers)
    if parameters is None or [_size(x.kind) for x in parameters] != parameter_sizes(compiled.asm["ptx"]):
        return None
    return PreparedLaunch(driver, compiled, grid, parameters)


def fill_with_zeros(address: Address, words: int) -> Callable[..., None]:
    """Return an operation that fills part of a tensor of a call with zeros.

    Args:
        address: Where the part begins.
        words: The number of 4-byte words.
    """
    role, offset = address
    driver = _driver()
    assert driver is not None, "only recorded with a CUDA driver"

    def fill(addresses: Sequence[int], stream: int, *_: Any) -> None:
        driver.check(driver.fill(addresses[role] + offset, 0, words, stream))

    return fill


def may_replay(device: int, stream: int) -> bool:
    """Return whether launches that were recorded on a stream may be repeated now.

    Args:
        device: The index of the device of the launches, which must be the current one.
        stream: Their stream, which must be the current one. While a graph is captured, nothing is repeated: the graph
            needs counters of its own.
    """
    return not (_get_device() != device or _get_stream(device) != stream or _is_capturing() or has_hooks())


def has_hooks() -> bool:
    """Return whether a profiler wants to see launches: the hooks of Triton are called by ordinary ones only."""
    runtime = _runtime_knobs()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@cache
def _runtime_knobs() -> Any:
    from triton import knobs

    return knobs.runtime


#: Calls of torch that its public functions wrap; a build for CPUs has none of them.
_get_device = getattr(torch._C, "_cuda_getDevice", int)
_get_stream = getattr(torch._C, "_cuda_getCurrentRawStream", int)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)


def parameter_sizes(ptx: str) -> list[int]:
    """Return the bytes of each parameter of a PTX module's kernel, in order.

    >>> parameter_sizes(".entry f(.param .align 64 .b8 f_0[128], .param .u32 f_1, .param .u64 .ptr f_2)")
    [128, 4, 8]
    """
    entry = re.search(r"\.entry\s+\S+\((.*?)\)", ptx, re.DOTALL)
    out = []
    for parameter in entry[1].split(",") if entry else ():
        bits = re.search(r"\.[busf](\d+)", parameter)
        array = re.search(r"\[(\d+)\]", parameter)
        out.append(int(bits[1]) // 8 * (int(array[1]) if array else 1) if bits else 0)
    return out


def _parameters(
    compiled: Any, arguments: Sequence[Any], locate: Callable[[Tensor], Address | None], numbers: Container[str]
) -> list[Parameter] | None:
    """Return the kernel's parameters, as Triton passes arguments: a descriptor is followed by its sizes."""
    out: list[Parameter] = []
    descriptors = iter(compiled.metadata.tensordesc_meta or ())
    # constexprs come last, and are no parameters of the compiled kernel
    for (name, kind), argument in zip_longest(compiled.src.signature.items(), arguments):
        if kind == "constexpr":
            continue
        if not isinstance(kind, str):
            return None  # a tuple: none of our kernels has one
        if kind.startswith("tensordesc"):
            meta, points_to = next(descriptors, None), locate(argument.base)
            encoded = None if meta is None else _encode_descriptor(argument, meta)
            if encoded is None or points_to is None:
                return None
            content, shape, strides = encoded
            out.append(Parameter(DESCRIPTOR, content, points_to))
            out.extend(Parameter("i32", size) for size in shape)
            out.extend(Parameter("i64", stride) for stride in strides)
        elif kind.startswith("*"):
            points_to = locate(argument)
            if points_to is None:
                return None
            out.append(Parameter(kind, argument.data_ptr(), points_to))
        elif kind in _FORMATS:
            out.append(Parameter(kind, argument, number=name if name in numbers else ""))
        else:
            return None
    return [*out, Parameter("*i8", 0), Parameter("*i8", 0)]  # scratch of Triton and of its profiler: none


def _encode_descriptor(descriptor: Any, meta: Any) -> tuple[bytes, Sequence[int], Sequence[int]] | None:
    """Return the CUtensorMap that Triton makes for a descriptor, its shape and its strides."""
    from triton.backends.nvidia import driver as triton_driver

    encode = triton_driver.make_tensordesc_arg
    try:
        encoded, *sizes = encode(descriptor, meta)
    except TypeError:  # Triton 3.8 and later pass a third argument, for im2col
        encoded, *sizes = encode(descriptor, meta, None)
    if type(encoded).__basicsize__ != _DESCRIPTOR_OFFSET + DESCRIPTOR_BYTES:
        return None
    content = ctypes.string_at(id(encoded) + _DESCRIPTOR_OFFSET, DESCRIPTOR_BYTES)
    rank = len(sizes) // 2
    return content, sizes[:rank], sizes[rank:]


def _attributes(metadata: Any) -> Any:
    """Return the launch attributes of a kernel: clusters, cooperative launch, programmatic dependent launch."""
    found: list[_Attribute] = []
    if metadata.launch_pdl:
        found.append(_attribute(_SERIALIZATION, 1))
    if metadata.launch_cooperative_grid:
        found.append(_attribute(_COOPERATIVE, 1))
    if metadata.num_ctas != 1:
        found.append(_attribute(_CLUSTER_DIMENSION, metadata.num_ctas, 1, 1))
        found.append(_attribute(_CLUSTER_SCHEDULING, 1))  # spread
    return (_Attribute * len(found))(*found)


def _attribute(number: int, *values: int) -> _Attribute:
    return _Attribute(number, b"", (ctypes.c_uint32 * 16)(*values))


def _write_number(address: int, kind: str, value: Any) -> None:
    content = struct.pack(_FORMATS[kind], value)
    ctypes.memmove(address, content, len(content))


def _size(kind: str) -> int:
    if kind == DESCRIPTOR:
        return DESCRIPTOR_BYTES
    return 8 if kind.startswith("*") else struct.calcsize(_FORMATS[kind])


def _offsets(sizes: Sequence[int], alignments: Sequence[int]) -> list[int]:
    """Return where each parameter begins in memory, each at a multiple of its alignment."""
    out, end = [], 0
    for size, alignment in zip(sizes, alignments, strict=True):
        out.append(-(-end // alignment) * alignment)
        end = out[-1] + size
    return out
