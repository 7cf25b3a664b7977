"""Detect changes that a refactoring must not make: programs, machine code, bytes moved, fields of error messages.

    make digests                      compare with tests/digests.json
    make digests DIGESTS=--write      overwrite that file, after an intended change

The record has a digest for each schedule, world size and mask family, and for each kernel that the tests compile.
Digests do not depend on names: renaming a class, a kernel or a file changes none of them.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import bytes_moved as moved
from cross import missing_tool
from gemm import test_fused_compile, test_gemm_compile
from kernels import test_compile
from meshflash.bench.cases import Case
from meshflash.check.suite import LAYOUTS, MASKS
from meshflash.core.problem import Problem
from meshflash.schedules.registry import build, default_layout, schedule_variants

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "digests.json"
WORLDS = range(1, 17)
TARGETS = ("sm_90", "sm_80", "gfx942")
#: Batch size for the mask families with separate documents per batch row.
BATCH = 2
console = Console()


def digest(value: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of a value's JSON, which is enough to detect changes."""
    return hashlib.sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()[:16]


def positional(value: Any) -> Any:
    """Convert a dataclass to the list of its values, without field names."""
    if is_dataclass(value):
        return [type(value).__name__, *(positional(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    return [positional(x) for x in value] if isinstance(value, tuple | list) else value


def programs() -> Iterator[tuple[str, str]]:
    """Yield digests of every schedule: all mask families on its default layout, a causal mask on all layouts."""
    for world in WORLDS:
        tokens = 6 * world + 5  # uneven shards
        for schedule in schedule_variants(world):
            own = default_layout(schedule)(tokens, world)
            cases = [(family, own, make(tokens)) for family, make in MASKS.items()]
            cases += [(name, make(tokens, world), MASKS["causal"](tokens)) for name, make in LAYOUTS.items()]
            for name, layout, mask in cases:
                problem = Problem(layout.ranges, layout.ranges, mask, 4, 2)
                try:
                    found: Any = [
                        positional(build(schedule, problem, rank, direction))
                        for direction in ("forward", "backward")
                        for rank in range(world)
                    ]
                except ValueError as error:
                    found = type(error).__name__
                yield f"{schedule}, {world} ranks, {name}", digest(found)
                build.cache_clear()


def kernels(target: str) -> Iterator[tuple[str, str]]:
    """Yield a digest for every call of the compile tests: the machine code of all kernels that it launches."""
    for name, suite in (("attention", test_compile), ("gemm", test_gemm_compile), ("fused gemm", test_fused_compile)):
        compile_all: Callable[..., Any] = suite.compiled
        for number, (call, built) in enumerate(compile_all(target, suite.ALL[target]).items()):
            codes = built if isinstance(built, str) else [kernel.code for kernel in built]
            yield f"{target} {name} {number:03d}: {call}", digest(codes)


def bytes_moved() -> Iterator[tuple[str, str]]:
    """Yield digests of the bytes that each rank receives, by schedule, mask and number of ranks."""
    for world in (2, 4, 8):
        for mask in ("full", "causal"):
            case = Case(tokens=4096, batch=1, heads=8, kv_heads=8, head_dim=64, mask=mask, dtype="bfloat16")
            for row in moved.run(case, schedule_variants(world), world):
                key = f"{row.schedule}, {world} ranks, {mask}, {row.direction}"
                yield key, digest([row.received_mean, row.received_bytes, row.peer_bytes])


def error_fields() -> Iterator[tuple[str, str]]:
    """Yield how many errors the source raises, by exception type and number of values in the message."""
    found: Counter[str] = Counter()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = ast.unparse(node.exc.func)
                values = sum(isinstance(part, ast.FormattedValue) for part in ast.walk(node.exc))
                found[f"{kind} with {values} values"] += 1
    for key, count in sorted(found.items()):
        yield key, str(count)


def collect() -> dict[str, dict[str, str]]:
    """Return all sections of the record."""
    sections: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "programs": programs,
        "bytes": bytes_moved,
        "errors": error_fields,
    }
    for target in TARGETS:
        if lacking := missing_tool(target):
            console.print(f"skip kernels for {target}: this machine has no {lacking}")
        else:
            sections[f"kernels {target}"] = partial(kernels, target)
    found: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor(2) as pool:  # threads suffice: kernels compile in separate processes
        for name, rows in zip(sections, pool.map(lambda make: dict(make()), sections.values()), strict=True):
            found[name] = rows
            console.print(f"{name}: {len(rows)} digests")
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return a line for each row that was added or removed or has another digest.

    Renaming changes keys. Two records with equally many rows are therefore compared by position, not by key.
    """
    if len(before) == len(after):
        pairs = zip(before.items(), after.items(), strict=True)
        return [f"{old} -> {new}" for (old, a), (new, b) in pairs if a != b]
    keys = before.keys() | after.keys()
    return sorted(
        f"{key}: {before.get(key, 'new')} -> {after.get(key, 'gone')}"
        for key in keys
        if before.get(key) != after.get(key)
    )


def main(
    write: Annotated[bool, typer.Option(help="Overwrite the record.")] = False,
    record: Annotated[Path, typer.Option(help="The file of recorded digests.")] = RECORD,
) -> None:
    """Compare digests with the record; exit with status 1 if any differs."""
    found = collect()
    if write:
        record.write_text(json.dumps(found, indent=0) + "\n")
        return
    before = json.loads(record.read_text())
    num_different = 0
    for name, rows in found.items():
        lines = differences(before.get(name, {}), rows)
        num_different += len(lines)
        console.print(f"{name}: {len(rows) - len(lines)} of {len(rows)} equal")
        for line in lines[:20]:
            console.print(f"  {line}", highlight=False)
    raise typer.Exit(int(num_different > 0))


if __name__ == "__main__":
    typer.run(main)
