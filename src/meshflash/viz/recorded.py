"""Measured timelines, from the files that ranks write under MESHFLASH_TRACE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshflash.core.reading import read_object
from meshflash.planner.timeline import Event, Timeline

#: The limit on the size of one rank's trace, in bytes.
TRACE_BYTES = 1 << 30
#: The expected content, for error messages.
EXPECTED = "a trace that a rank wrote under MESHFLASH_TRACE"


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all trace files in a folder; raise ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; run with MESHFLASH_TRACE={folder}")
    files = sorted(folder.glob("trace-*.json"))
    if not files:
        raise ValueError(f"{folder}: no trace-*.json in this folder; run with MESHFLASH_TRACE={folder}")
    return [event for file in files for event in _events(file)]


def _events(file: Path) -> list[dict[str, Any]]:
    events: Any = read_object(file, EXPECTED, TRACE_BYTES).get("traceEvents")
    sound = isinstance(events, list) and all(isinstance(event, dict) and "ph" in event for event in events)
    if not sound or any(not isinstance(event.get("args"), dict) for event in events if event["ph"] == "X"):
        raise ValueError(f"{file}: no list of traceEvents in it; expected {EXPECTED}")
    return list(events)


def calls(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the recorded calls in order of time, each as (group, index of the call within the group)."""
    found: dict[tuple[str, int], float] = {}
    for event in events:
        if event["ph"] == "X":
            key = event["args"]["group"], event["args"]["call"]
            found[key] = min(found.get(key, event["ts"]), event["ts"])
    return sorted(found, key=lambda key: found[key])


def timeline(events: list[dict[str, Any]], group: str, call: int) -> Timeline:
    """Return the timeline of one call on all ranks of a group; clocks of different hosts are not aligned.

    Args:
        events: The events of all ranks, from `read`.
        group: The name of the group.
        call: The index of the call within the group.
    """
    wanted = {"group": group, "call": call}
    own = [event for event in events if event["ph"] == "X" and wanted.items() <= event["args"].items()]
    first = min(event["ts"] for event in own)
    about = own[0]["args"]
    made = [
        Event(
            event["pid"],
            event["cat"],
            (event["ts"] - first) * 1e-6,
            (event["ts"] + event["dur"] - first) * 1e-6,
            event["name"],
            event["args"]["step"],
        )
        for event in own
    ]
    name = f"{about['schedule']} {about['pass']}"
    return Timeline(name, about["world"], tuple(sorted(made, key=lambda event: (event.rank, event.step))), "measured")
