"""meshflash: exact attention over sequences that no single device can hold."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meshflash.attention import flash_attention
    from meshflash.core.layout import Layout, positions
    from meshflash.core.mask import Mask

__all__ = ["Layout", "Mask", "__version__", "flash_attention", "positions"]

_HOMES = {
    "flash_attention": "meshflash.attention",
    "Layout": "meshflash.core.layout",
    "Mask": "meshflash.core.mask",
    "positions": "meshflash.core.layout",
}


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line's help does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'meshflash' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
