"""Modules keep no state of their own: what lasts is in a registry, in the engine's cache, or in the process's state."""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import meshflash

#: All module-level names of values that change, and why each is allowed. A new one belongs in `runtime.state.state`,
#: which `shutdown` empties and a forked child does not inherit.
ALLOWED = {
    # the two that hold what calls share
    "meshflash.engine.cache.cache": "the one cache of compiled calls",
    "meshflash.runtime.state.state": "the state of the process until shutdown",
    # registries, filled by imports and by public calls
    "meshflash.schedules.registry._SCHEDULES": "registered schedules",
    "meshflash.schedules.registry._loaded": "whether the modules of all schedules were imported",
    "meshflash.schedules.registry.on_change": "functions to call when a schedule is registered",
    "meshflash.kernels.registry.on_forget": "functions to call when rates change",
    "meshflash.kernels.triton.configs.on_change": "functions to call when configurations are forced",
    "meshflash.runtime.world.on_end": "functions to call in shutdown",
    "meshflash.parallel.forward_wrapper._made": "generated classes, by the classes that they wrap",
    # of models of other libraries, which find functions that are registered with them by name
    "meshflash.integrations.transformers.attention._stacks": "stacks of sharded models, until they are removed",
    "meshflash.integrations.compat.hf_adapter._adapter": "ranks and documents of ring-flash-attention's adapter",
    # registries of open `with` blocks, which remove what they added
    "meshflash.kernels.registry.open_logs": "logs of open record_kernels blocks",
    "meshflash.engine.trace._asked": "traces of open recording blocks",
    "meshflash.kernels.triton.configs._forced": "configurations of open forced blocks",
    # attached to worklists, and freed with them; shutdown drops all worklists
    "meshflash.kernels.registry._choices": "choices of kernels",
    "meshflash.kernels.triton.block_tables._tables": "tables of tiles",
    "meshflash.kernels.hopper.split_kv._cache": "splits of tables of tiles",
    # of the process as such, whatever jobs it joins
    "meshflash.runtime.liveness._here": "answers peers whether this process lives, until it ends",
    "meshflash.runtime.liveness._lock": "guards _here",
    "meshflash.runtime.store._threads": "threads to join when the process ends",
    "meshflash.runtime.store._exiting": "whether the process ends",
    "meshflash.runtime.world._rendezvous_numbers": "numbers that no later job of this process may use again",
    "meshflash.engine.trace.trace": "the record that MESHFLASH_TRACE asks for, written when the process ends",
    # device memory, by stream
    "meshflash.kernels.hopper.launch._counters": "tile counters; Kernel.release frees them in shutdown",
    # locks
    "meshflash.kernels.launches._interpreter_lock": "Triton's interpreter runs one launch at a time",
}
#: Cached functions that hold more than plain values, and why each is allowed.
ALLOWED_CACHES = {
    "meshflash.kernels.prepared_launch._runtime_knobs": "Triton's settings",
    "meshflash.kernels.vendor.gpu._no_dropout": "two zeros on each device; Kernel.release frees them",
    "meshflash.kernels.vendor.gpu._import_module": "modules",
    "meshflash.kernels.vendor.gpu._function_and_parameters": "functions of modules",
    "meshflash.integrations.torch_cp._without_asking": "copies of four functions of torch",
}

#: Modules that need libraries of `make test-integrations`.
NEEDS_LIBRARIES = ("accelerate", "diffusers", "lightning", "torchtitan")

CHANGING_METHODS = {
    *("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard"),
    *("clear", "sort", "reverse"),
}
HOLDS_MORE = re.compile(r"\bTensor\b|\bAny\b|ProcessGroup|GroupContext|\bCallable\b")
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*|__all__")
PLAIN_TYPES: tuple[type, ...] = (
    *(str, bytes, int, float, complex, range, type(None), frozenset, type, re.Pattern, Path),
    *(torch.device, torch.dtype, torch.finfo, torch.Size),
)
#: Objects of other packages that hold no state of ours: functions, kernels, type aliases, loggers, commands.
FOREIGN = (
    *("typing", "types", "builtins.function", "builtins.builtin", "triton", "collections.abc", "logging", "typer"),
    *("builtins.module", "torch._library", "torch._ops", "contextlib.nullcontext", "datetime", "_hashlib"),
)


@functools.cache
def modules() -> list[ModuleType]:
    """Import all modules of the package."""
    found = [module.name for module in pkgutil.walk_packages(meshflash.__path__, "meshflash.")]
    left_out = tuple(f"meshflash.integrations.{name}" for name in NEEDS_LIBRARIES if not find_spec(name))
    return [importlib.import_module(name) for name in found if not name.endswith(("__main__", *left_out))]


@functools.cache
def trees() -> list[tuple[ModuleType, ast.Module]]:
    """Return all modules with their parsed source."""
    return [(module, ast.parse(Path(str(module.__file__)).read_text())) for module in modules()]


def names_bound_in(tree: ast.Module) -> set[str]:
    """Return the names that a module binds by assignment, also inside of `if` and `try`; imports bind none."""
    found: set[str] = set()
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if getattr(node, "decorator_list", None) and not isinstance(node, ast.ClassDef):
                found.add(node.name)  # a decorator may make anything of it, such as a cached function
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        pending += ast.iter_child_nodes(node)
    return found


def is_mutable(value: Any) -> bool:
    """Return whether a value can change."""
    kind = type(value)
    if isinstance(value, tuple):
        return any(is_mutable(part) for part in value)
    if isinstance(value, (*PLAIN_TYPES, functools._lru_cache_wrapper)):
        return False  # cached functions have a test of their own
    if is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return False
    return not f"{kind.__module__}.{kind.__qualname__}".startswith(FOREIGN)


def mutables_of(module: ModuleType, tree: ast.Module) -> list[str]:
    """Return the names of values that can change, but for constants: containers with a name in capitals."""
    containers = (dict, list, set)
    return [
        f"{module.__name__}.{name}"
        for name in sorted(names_bound_in(tree))
        if hasattr(module, name)
        and is_mutable(value := getattr(module, name))
        and not (CONSTANT.fullmatch(name) and isinstance(value, containers))
    ]


def class_mutables_of(module: ModuleType) -> list[str]:
    """Return the containers in lower case that classes of a module share between their instances."""
    return [
        f"{module.__name__}.{kind.__name__}.{name}"
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
        for name, value in vars(kind).items()
        if isinstance(value, dict | list | set) and not name.startswith("_") and not CONSTANT.fullmatch(name)
    ]


def rebound_in(module: ModuleType, tree: ast.Module) -> Iterator[str]:
    """Yield module-level names that functions rebind: by `global`, or as attributes of another module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from (f"{module.__name__}.{name}" for name in node.names)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            owner = getattr(module, node.value.id, None)
            if isinstance(owner, ModuleType) and owner.__name__.startswith("meshflash"):
                yield f"{owner.__name__}.{node.attr}"


def changed_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names in capitals whose containers some function changes; while it is imported, a module may."""

    def name_of(node: ast.AST) -> str:
        return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""

    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    for node in dict.fromkeys(inner for function in functions for inner in ast.walk(function)):
        name = ""
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            name = name_of(node.value)
        elif isinstance(node, ast.AugAssign):
            name = name_of(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING_METHODS:
            name = name_of(node.func.value)
        if CONSTANT.fullmatch(name):
            yield name


def unsafe_caches_of(module: ModuleType) -> Iterator[str]:
    """Yield cached functions that are unbounded over many values, or whose types may be tensors or process groups."""
    for name, value in vars(module).items():
        if not isinstance(value, functools._lru_cache_wrapper) or value.__module__ != module.__name__:
            continue
        types = {key: str(kind) for key, kind in value.__wrapped__.__annotations__.items()}
        holds_more = any(
            re.search(r"\bTensor\b|\bAny\b|ProcessGroup|GroupContext|\bCallable\b", kind) for kind in types.values()
        )
        few = ("torch.device", "str", "int")  # devices, their names, head dims
        unbounded = value.cache_parameters()["maxsize"] is None
        if holds_more or (unbounded and any(kind not in few for key, kind in types.items() if key != "return")):
            yield f"{module.__name__}.{name}"


def test_modules_hold_no_mutable_but_registries_and_the_one_cache():
    found = [name for module, tree in trees() for name in (*mutables_of(module, tree), *class_mutables_of(module))]
    assert not set(found) - set(ALLOWED), "put it into meshflash.runtime.state.state, which shutdown empties"


def test_allowed_mutables_exist():
    for name in (*ALLOWED, *ALLOWED_CACHES):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), f"{name} is gone: take it off the list"


def test_functions_rebind_no_module_level_name():
    found = {name for module, tree in trees() for name in rebound_in(module, tree)}
    assert not found - set(ALLOWED)


def test_constants_are_never_changed():
    registries = {name.rpartition(".")[2] for name in ALLOWED}
    for module, tree in trees():
        assert not set(changed_in(tree)) - registries, f"{module.__name__} changes a name in capitals"


def test_cached_functions_are_bounded_and_hold_no_tensor_and_no_group():
    found = {name for module in modules() for name in unsafe_caches_of(module)}
    assert not found - set(ALLOWED_CACHES)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("_seen = {}", ["made_up._seen"]),
        ("if True:\n    _seen: list[int] = []", ["made_up._seen"]),
        ("import weakref\n_seen = weakref.WeakSet()", ["made_up._seen"]),
        ("import torch\n_zero = torch.zeros(1)", ["made_up._zero"]),
        ("class Holder:\n    pass\nholder = Holder()", ["made_up.holder"]),
        ("_pair = (1, [])", ["made_up._pair"]),
        ("class A:\n    seen = []", ["made_up.A.seen"]),
        ("def f():\n    global _here\n    _here = 1", ["made_up._here"]),
        ("from meshflash.runtime import world\ndef f():\n    world.now = 1", ["meshflash.runtime.world.now"]),
        ("SIZES = {}\ndef f():\n    SIZES[1] = 2", ["SIZES"]),
        ("SIZES = []\ndef f():\n    SIZES.append(2)", ["SIZES"]),
        ("from functools import cache\n@cache\ndef f(x: tuple[int, ...]) -> int:\n    return 1", ["made_up.f"]),
        ("from functools import lru_cache\n@lru_cache(4)\ndef f(x: int) -> Tensor:\n    return None", ["made_up.f"]),
        ("SIZES = {1: 2}\nNAMES = ['a']\nPAIR = (1, 'a')\ndef f(x):\n    x[0] = 1", []),
        ("from functools import cache\n@cache\ndef f(name: str) -> int:\n    return 1", []),
    ],
)
def test_new_state_of_a_module_is_found(source, names):
    module, tree = ModuleType("made_up"), ast.parse(source)
    exec(compile(source, "made_up.py", "exec", __future__.annotations.compiler_flag, dont_inherit=True), vars(module))
    found = [*mutables_of(module, tree), *class_mutables_of(module), *rebound_in(module, tree), *changed_in(tree)]
    assert [*found, *unsafe_caches_of(module)] == names
