"""The judge of the soak campaign: pure functions that list the failures of a case, from the reports of its ranks.

An empty list means that the case passed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from soak.cases import GRACE
from soak.zygote import FinishedJob

_RANK_LIST = r"(\d+(?:(?:, | and | or (?:rank )?)\d+)*)"
_RANKS = re.compile(rf"\branks? {_RANK_LIST}")
#: A rank that only reports is not blamed: "rank 1 reported: rank 2 was lost" blames rank 2.
_REPORTERS = re.compile(
    rf"\b(?:(?:reported|told|said) by ranks? {_RANK_LIST}|ranks? {_RANK_LIST} (?:raised|reported|says|said):)"
)


def blamed(message: str, own: int) -> set[int]:
    """Return the ranks that a survivor's message blames, without the survivor itself.

    >>> blamed("rank 1 of 3: rank 0 was lost", 1)
    {0}
    >>> blamed("rank 1 raised: rank 2 was lost", 0), blamed("rank 1 raised: no memory", 0)
    ({2}, {1})
    >>> sorted(blamed("rank 0 or rank 2 was lost", 1)), sorted(blamed("rank 1, 2 did not come", 0))
    ([0, 2], [1, 2])
    """
    for text in (_REPORTERS.sub("", message), message):
        found = {int(number) for group in _RANKS.findall(text) for number in re.findall(r"\d+", group)}
        if found - {own}:
            return found - {own}
    return set()


def judge_survivors(job: FinishedJob, victims: Collection[int], timeout: float) -> list[str]:
    """Return the failures of the survivors of a fault: each must end in time, with an error that names a victim."""
    wrong = []
    if job.fired is None:
        messages = [f"rank {rank}: {job.report(rank).get('message', 'nothing')}" for rank in range(len(job.codes))]
        return [f"the fault never came; codes {job.codes}, {'; '.join(messages)}"]
    for rank, code in enumerate(job.codes):
        if rank in victims:
            continue
        report = job.report(rank)
        message = f"{report.get('error', '')}: {report.get('message', '')}"
        if code is None:
            raised = f" after it had raised {message}" if "error" in report else ""
            wrong.append(f"rank {rank} still ran {timeout + GRACE:g} s after the fault{raised}")
        elif code < 0:
            wrong.append(f"rank {rank} ended by {signal.Signals(-code).name}; {message}")
        elif "error" not in report:
            wrong.append(f"rank {rank} ended with code {code} and did not notice the fault")
        else:
            names = blamed(report["message"], rank)
            if not names or not names <= set(victims):
                verdict = f"blames {', '.join(map(str, sorted(names)))}" if names else "names no rank"
                fault = ", ".join(map(str, sorted(victims)))
                wrong.append(f"rank {rank} {verdict}, and the fault was of {fault}: {message}")
    return wrong


def seconds_to_end(job: FinishedJob, victims: Collection[int]) -> float | None:
    """Return the seconds from the fault to the end of the last survivor; None without survivors or if one hung."""
    survivors = [rank for rank in range(len(job.codes)) if rank not in victims]
    if job.fired is None or not survivors or any(job.codes[rank] is None for rank in survivors):
        return None
    return max(0.0, *(job.times[rank] - job.fired for rank in survivors), 0.0)


def judge_success(job: FinishedJob, job_name: str) -> list[str]:
    """Return the failures of a job without a fault: every rank must exit with code 0."""
    wrong = []
    for rank, code in enumerate(job.codes):
        if code != 0:
            report = job.report(rank)
            end = "still ran" if code is None else f"ended with code {code}"
            wrong.append(f"{job_name}: rank {rank} {end}; {report.get('error', '')}: {report.get('message', '')}")
    return wrong


def judge_losses(losses: Sequence[float], step: int, undisturbed: Mapping[int, float]) -> list[str]:
    """Return the failures of a resumed run's losses, which end at `step`: they must be bitwise equal."""
    wrong = []
    first = step - len(losses) + 1
    for number, loss in enumerate(losses, first):
        if loss != undisturbed[number]:
            wrong.append(f"resumed: step {number} has the loss {loss!r}, and {undisturbed[number]!r} undisturbed")
    if step != max(undisturbed):
        wrong.append(f"resumed: ended at step {step}, and not at {max(undisturbed)}")
    return wrong


def judge_load(
    report: Mapping[str, Any], code: int | None, expected: str, folder: Path, names: Collection[str]
) -> list[str]:
    """Return the failures of loading a checkpoint that may be damaged.

    Either every loaded value equals the saved one, or a CheckpointError names one of `names` and no value has changed.
    """
    if code is None:
        return ["loading hung"]
    if code:
        return [f"loading ended with code {code}; {report.get('error', '')}: {report.get('message', '')}"]
    if "error" not in report:
        return (
            []
            if report.get("digest") == expected
            else ["loaded without an error, and the values are not the saved ones"]
        )
    wrong = []
    if report["error"] != "CheckpointError":
        wrong.append(f"refused by {report['error']}, not by a CheckpointError: {report['message']}")
    if report["changed"]:
        wrong.append("refused, and yet the model has changed")
    first = report["message"].split("; step")[0]
    if not any(str(folder / name) in first for name in names):
        wrong.append(f"refused without the name of {' or '.join(sorted(names))}: {report['message']}")
    return wrong


def judge_refused_save(text: str, folder: str, reasons: Collection[str]) -> list[str]:
    """Return the failures of a rank's output after a failed save: it must be one error with path and reason."""
    wrong = []
    if "Traceback (most recent call last)" in text:
        wrong.append(f"a traceback: {text[-400:]}")
    lines = " ".join(text.split())
    if folder not in lines:
        wrong.append(f"the error does not name {folder}: {lines[-300:]}")
    if not any(reason in lines for reason in reasons):
        wrong.append(f"the error does not say {' or '.join(reasons)}: {lines[-300:]}")
    return wrong
