"""Triton's interpreter without the work whose results it throws away: kernels run in less than half the time.

The results are the same. Whatever is not there in the installed Triton stays as it is.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from typing import Any


def speed_up() -> None:
    """Change Triton's interpreter in this process, if kernels are interpreted; a second call changes nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    options = getattr(interpreter.interpreter_builder, "options", None)
    if options is not None and not getattr(options, "debug", True) and hasattr(options, "sanitize_overflow"):
        # without debug nobody asserts the conditions that are computed in int64 for each sum and product
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    _patch_once(interpreter, tl)
    _cache_dtypes(interpreter, tl)


def _patch_once(interpreter: Any, tl: Any) -> None:
    """Replace the language's functions once a launch, rather than again in each device function that it calls."""
    patch, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None or hasattr(patch, "once"):
        return
    modules: dict[Any, list[Any]] = {}

    def is_patched(lang: Any) -> bool:
        return not any(map(tl.core.is_builtin, (lang.load, lang.tensor.to, tl.math.exp2)))

    def once(fn: Any) -> Any:
        if fn not in modules:
            modules[fn] = [x for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]
        return scope() if modules[fn] and all(map(is_patched, modules[fn])) else patch(fn)

    vars(once)["once"] = True
    interpreter._patch_lang = once


def _cache_dtypes(interpreter: Any, tl: Any) -> None:
    """Look numpy's type for one of Triton's up in a table that is made once, rather than anew for each."""
    compute = getattr(interpreter, "_get_np_dtype", None)
    if compute is None or hasattr(compute, "cached"):
        return
    known: dict[str, Any] = {}

    def cached(dtype: Any) -> Any:
        if type(dtype) is not tl.dtype:
            return compute(dtype)
        if dtype.name not in known:
            known[dtype.name] = compute(dtype)
        return known[dtype.name]

    vars(cached)["cached"] = True
    interpreter._get_np_dtype = cached
