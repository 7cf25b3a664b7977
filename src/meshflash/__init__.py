"""meshflash: exact attention over sequences sharded across devices."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meshflash.api import attention, flash_attention
    from meshflash.comm.handshake import DisagreementError
    from meshflash.comm.transports.contract import TransportError
    from meshflash.core.layout import Layout, positions
    from meshflash.core.mask import Mask
    from meshflash.core.problem import Problem
    from meshflash.core.program import Program
    from meshflash.core.verify import VerificationError, verify_programs
    from meshflash.engine.check import WrongResultError
    from meshflash.engine.compile import prepare
    from meshflash.engine.group_context import MissingRankError
    from meshflash.job import init, shutdown
    from meshflash.merging import merge_partials
    from meshflash.runtime.devices import peak_memory
    from meshflash.runtime.liveness import LostRankError
    from meshflash.runtime.world import World
    from meshflash.schedules.registry import build_program, register_schedule, unregister_schedule
    from meshflash.sharding import shard, unshard

__all__ = [
    "DisagreementError",
    "Layout",
    "LostRankError",
    "Mask",
    "MissingRankError",
    "Problem",
    "Program",
    "TransportError",
    "VerificationError",
    "World",
    "WrongResultError",
    "__version__",
    "attention",
    "build_program",
    "flash_attention",
    "init",
    "merge_partials",
    "peak_memory",
    "positions",
    "prepare",
    "register_schedule",
    "shard",
    "shutdown",
    "unregister_schedule",
    "unshard",
    "verify_programs",
]

#: The module that defines each public name.
_MODULES = {
    "DisagreementError": "meshflash.comm.handshake",
    "LostRankError": "meshflash.runtime.liveness",
    "MissingRankError": "meshflash.engine.group_context",
    "TransportError": "meshflash.comm.transports.contract",
    "VerificationError": "meshflash.core.verify",
    "WrongResultError": "meshflash.engine.check",
    "unregister_schedule": "meshflash.schedules.registry",
    "attention": "meshflash.api",
    "build_program": "meshflash.schedules.registry",
    "flash_attention": "meshflash.api",
    "Layout": "meshflash.core.layout",
    "Mask": "meshflash.core.mask",
    "merge_partials": "meshflash.merging",
    "positions": "meshflash.core.layout",
    "prepare": "meshflash.engine.compile",
    "Problem": "meshflash.core.problem",
    "Program": "meshflash.core.program",
    "register_schedule": "meshflash.schedules.registry",
    "shard": "meshflash.sharding",
    "shutdown": "meshflash.job",
    "init": "meshflash.job",
    "peak_memory": "meshflash.runtime.devices",
    "World": "meshflash.runtime.world",
    "unshard": "meshflash.sharding",
    "verify_programs": "meshflash.core.verify",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `meshflash --help` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'meshflash' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
