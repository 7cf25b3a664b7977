"""Wrap the forward of a module in place by swapping its class for a subclass.

The module keeps its weights, state-dict names and deep copies. Assigning `module.forward` instead would be shared with
deep copies, which would then compute with the weights of the original.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class ForwardWrapper(nn.Module):
    """Base of mixins whose forward runs before that of the module's own class and calls it as `super().forward`."""


#: Generated subclasses by (wrapper, module class), so that all modules of a class share one subclass.
_made: dict[tuple[Any, Any], Any] = {}


def wrap_forward(module: nn.Module, wrapper: type[ForwardWrapper], **values: Any) -> None:
    """Give a module the forward of a wrapper; on a module that has it already only the values change.

    Args:
        module: The module to change in place.
        wrapper: The mixin whose forward comes first.
        values: Attributes that the wrapper reads from the module.
    """
    if not isinstance(module, wrapper):
        kind = type(module)
        if (wrapper, kind) not in _made:
            _made[wrapper, kind] = type(kind.__name__, (wrapper, kind), {"__module__": kind.__module__})
        module.__class__ = _made[wrapper, kind]
    for name, value in values.items():
        setattr(module, name, value)
