"""Operations of Gluon whose names differ between Triton 3.6 and 3.9, each under one name.

Gluon is young and renames freely. Every other file takes these operations from here.
"""

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Whether the compiler packs each wgmma descriptor from two halves, as since Triton 3.9. ptxas then keeps descriptors
#: of buffers at constant indices in registers over whole loops.
PACKS_DESCRIPTORS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)
#: Launch option: the register allocation that ptxas chooses by itself. Triton 3.9 asks for a simpler one, which spills
#: more; earlier versions come with a ptxas that ignores what they ask for.
DEFAULT_REGISTER_ALLOCATION = {"ptx_options": "--regAllocOptLevel=4"} if PACKS_DESCRIPTORS else {}
#: TMA load: start to copy a block of global to shared memory; it completes on an mbarrier. Renamed in Triton 3.8.
copy_block = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
#: TMA store: start to copy a block of shared memory to global memory. Renamed in Triton 3.8.
store_block = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
#: Barrier over all threads of a warp-specialized partition. Renamed in Triton 3.7.
partition_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

if hasattr(tma, "async_atomic_add"):
    #: TMA reduce-add: start to add a block of shared memory to global memory.
    add_block = tma.async_atomic_add
else:  # Triton 3.6 and 3.7 have the operation, but no Python function for it
    from triton._C.libtriton import ir as _ir

    @_core.builtin
    def add_block(descriptor, coordinates, source, _semantic=None):
        """TMA reduce-add: start to add a block of shared memory to global memory."""
        at = _semantic._convert_to_ir_values(coordinates, require_i64=False)
        kind = _ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, at, source.handle)


@_core.builtin
def reinterpret(smem, dtype, shape, layout, _semantic=None):
    """Return a buffer in shared memory with another dtype, shape and layout. Public since Triton 3.9."""
    method = getattr(smem, "reinterpret", None) or smem._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
