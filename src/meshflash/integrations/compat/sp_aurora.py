"""sp-aurora's names: `sp_aurora_func` is a ring, `ulysses_flash_attn_func` exchanges heads for sequence.

>>> from meshflash.integrations.compat.sp_aurora import sp_aurora_func
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from meshflash.integrations.compat.calls import dense, forms


def _two(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with (output, LSE) for `return_attn_probs`: two values, as Ulysses returns them there."""

    @wraps(func)
    def two(*arguments: Any, **named: Any) -> Any:
        made = func(*arguments, **named)
        return made[:2] if isinstance(made, tuple) else made

    return two


sp_aurora_func, sp_aurora_kvpacked_func, sp_aurora_qkvpacked_func = dense("sp_aurora", "ring")
ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = dense("ring_flash_attn", "ring")
ulysses_flash_attn_func, ulysses_flash_attn_kvpacked_func, ulysses_flash_attn_qkvpacked_func = forms(
    "ulysses_flash_attn_", _two(dense("ulysses_flash_attn", "ulysses")[0])
)
