"""The record of a run: a header that says where the figures come from, and flat rows, as JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import meshflash
from meshflash.core.files import write_whole
from meshflash.core.reading import read_object

RECORD = "a record of a benchmark"


def header(command: str) -> dict[str, Any]:
    """Return the machine, versions, commit, date and command of this run."""
    import torch

    machine: dict[str, Any] = {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    versions = {
        "python": platform.python_version(),
        "meshflash": meshflash.__version__,
        "torch": torch.__version__,
    }
    for package in ("triton", "numpy"):
        versions[package] = _version(package)
    return {
        "machine": machine,
        "versions": versions,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def write(path: Path, rows: list[dict[str, Any]], command: str) -> None:
    """Write a record and its folders; OutputError if that fails, and an earlier record stays."""
    write_whole(path, json.dumps({"header": header(command), "rows": rows}, indent=1) + "\n")


class Recorder:
    """The rows of one run. A benchmark adds rows case by case; with a path, each addition rewrites the record.

    Rewriting keeps what is measured when a run is cut short. Without a path nothing is written. `header` is that of an
    earlier record whose rows are shown again; None means this run's.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.header: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []

    def add(self, rows: Iterable[Any]) -> None:
        """Add dataclass rows in their flat form."""
        self.rows += [flat(row) for row in rows]
        if self.path is not None:
            write(self.path, self.rows, command_line())

    def as_record(self) -> dict[str, Any]:
        """Return the record as `read` returns one that was written."""
        return {"header": self.header or header(command_line()), "rows": self.rows}


def flat(row: Any) -> dict[str, Any]:
    """Return a dataclass row as a dict: fields of its case beside its own, and `direction` under the key "pass"."""
    out: dict[str, Any] = {}
    for key, value in asdict(row).items():
        out |= value if key == "case" else {"pass" if key == "direction" else key: value}
    return out


def read(path: Path) -> dict[str, Any]:
    """Return a record that `write` made; ValueError, which names the file, for anything else."""
    record = read_object(path, RECORD)
    if not isinstance(record.get("header"), dict) or not isinstance(record.get("rows"), list):
        raise ValueError(f"{path}: no header and rows in it; expected {RECORD}")
    return record


def place(header: dict[str, Any], device: str) -> str:
    """Return the machine and the versions of a record, in a few words."""
    machine, versions = header["machine"], header["versions"]
    name = f"{machine['cores']} x {machine['cpu']}" if device == "cpu" else machine.get("gpu", device)
    triton = "" if device == "cpu" else f", Triton {versions['triton']}"
    return f"{name}, torch {versions['torch']}{triton}, Python {versions['python']}"


def command_line() -> str:
    """Return the command of this process as one would type it."""
    is_module = Path(sys.argv[0]).parts[-2:] == ("benchmarks", "__main__.py")
    program = ["python", "-m", "benchmarks"] if is_module else ["meshflash"]
    return shlex.join([*program, *sys.argv[1:]])


def _cpu_name() -> str:
    if shutil.which("lscpu"):
        for line in _output("lscpu").splitlines():
            if line.startswith("Model name:"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    here = str(Path(__file__).parent)
    commit = _output("git", "-C", here, "rev-parse", "--short", "HEAD").strip()
    if not commit:
        return "unknown"
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no", "--", ".").strip()
    return f"{commit} and changes" if changed else commit


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
