"""Run random cases on one rank: the steps of each case in order, in threads if a case has several.

Ranks take turns as the judge, so that one compares results with the oracle while the others continue. A rank that
exceeds the time limit of a case writes the stacks of its threads to a file and exits.
"""

from __future__ import annotations

import faulthandler
import re
import signal
import threading
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from meshflash.check.fuzz import Call, Does, FuzzCase, Group, Settings, derive
from meshflash.check.run import worst_error
from meshflash.check.spread import Result, Run
from meshflash.comm.handshake import DisagreementError
from meshflash.runtime.devices import take_device
from meshflash.runtime.processes import Tell

#: The outcome of one call on one rank: its results, or the message of a refusal.
Part = Result | str


@dataclass(frozen=True)
class Begun:
    """Message: a rank starts a case."""

    number: int


@dataclass(frozen=True)
class Failed:
    """Message: a case raised an error on a rank that is not a refusal."""

    number: int
    rank: int
    message: str


@dataclass(frozen=True)
class Judged:
    """Message: the outcome of a case and the counts of its calls by outcome: "right", "refused" or "missed".

    `share` is the largest error of its results over the allowed one. `refusals` are the messages of refused calls.
    """

    number: int
    outcome: str
    calls: dict[str, int]
    dimensions: dict[str, tuple[str, ...]]
    share: float = 0.0
    worst: str = ""
    message: str = ""
    refusals: tuple[str, ...] = ()


@dataclass
class Groups:
    """The process groups and meshes of this rank, created on first use and kept."""

    rank: int
    made: dict[Any, Any] = field(default_factory=dict)

    def make(self, group: Group, device: str) -> None:
        """Create a group if it does not exist. All ranks of the world call this in the same order.

        Local synchronization is not used: torch names such a group by its ranks, so a group that is created again after
        it was destroyed would find the keys of the first one in the store.
        """
        if group.kind in ("none", "world") or group in self.made:
            return
        if group.kind == "mesh":
            names = ("outer", "inner")[-len(group.shape) :]
            self.made[group] = dist.init_device_mesh(device, group.shape, mesh_dim_names=names)
        else:
            self.made[group] = dist.new_group(list(group.ranks))

    def of(self, group: Group) -> tuple[int, Any, Any]:
        """Return (rank within the group, process group, argument `mesh`) of a group of this rank."""
        place = group.ranks.index(self.rank)
        if group.kind == "none":
            return place, None, None
        if group.kind == "world":
            return place, dist.group.WORLD, None
        found = self.made[group]
        if group.kind == "mesh":
            return place, dist.group.WORLD if len(group.shape) == 2 else found.get_group(), found
        return place, found, found

    def leave(self, group: Group) -> None:
        """Destroy a group that was created for one case."""
        if group.kind == "new group" and (found := self.made.pop(group, None)) and self.rank in group.ranks:
            dist.destroy_process_group(found)


def run_cases_apart(rank: int, world: int, tell: Tell, *args: Any) -> None:
    """Run `run_cases` over a TCP store, as real jobs do.

    Local ranks rendezvous through a file store, which serves each thread separately. The threads of a real job share
    one connection to the TCP store and may block each other; this variant covers that.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if rank == 0 else None
    port = [store.port if store else 0]
    dist.broadcast_object_list(port, 0)
    store = store or dist.TCPStore("127.0.0.1", port[0], None, False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    run_cases(rank, world, tell, *args)


def run_cases(
    rank: int,
    world: int,
    tell: Tell,
    settings: Settings,
    numbers: Sequence[int],
    limit: float,
    folder: str,
    local_rank: int | None = None,
) -> None:
    """Run cases as one rank; report each start, and the outcome of each case that this rank judges.

    Args:
        rank: This rank.
        world: The number of ranks.
        tell: A function that receives `Begun`, `Failed` and `Judged`.
        settings: The settings that cases are derived from.
        numbers: The numbers of the cases, in order.
        limit: The time limit of a case, in seconds.
        folder: The folder for stacks of ranks that exceed the limit.
        local_rank: The local rank in a job that a launcher started; rank 0 is then the only judge.
    """
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch, on CPUs without bfloat16
    if threading.current_thread() is threading.main_thread() and local_rank is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the interrupt and ends its ranks
    groups = Groups(rank)
    with (Path(folder) / f"rank{rank}.txt").open("w") as stacks:
        for index, number in enumerate(numbers):
            faulthandler.dump_traceback_later(limit, exit=True, file=stacks)
            tell(Begun(number))
            try:
                case = derive(settings, number)
                take_device(settings.device, rank if local_rank is None else local_rank)
                mine = take_part(rank, case, groups, settings.threads)
            except BaseException:
                tell(Failed(number, rank, traceback.format_exc()))
                raise
            judge = index % world if local_rank is None else 0
            parts: list[Any] | None = [None] * world if rank == judge else None
            dist.gather_object(mine, parts, judge)
            if parts is not None:
                tell(judged(case, parts))
        faulthandler.cancel_dump_traceback_later()


def take_part(rank: int, case: FuzzCase, groups: Groups, threads: bool) -> dict[int, Part]:
    """Run a case on this rank, and return the outcome of each call that it takes part in, by the call's index.

    Args:
        rank: This rank.
        case: The case.
        groups: The process groups of this rank.
        threads: Whether to run threads concurrently; otherwise their calls run one after another.
    """
    mine = {n: call for n, call in enumerate(case.calls) if rank in call.group.ranks}
    single_threaded = case.threads == 1 or not threads
    together = any(does == "backward of all" for does, _ in case.steps)
    runs: dict[int, Run] = {}
    for call in case.calls:
        groups.make(call.group, call.item.device)
    for n, call in mine.items():
        place, group, mesh = groups.of(call.group)
        runs[n] = Run(place, group, call.item, mesh, count=single_threaded)
    refused: dict[int, str] = {}
    if single_threaded:
        _take_steps(case.steps, mine, runs, refused)
    else:
        _in_threads(case, mine, runs, refused)
    out: dict[int, Part] = {}
    for n, run in runs.items():
        out[n] = refused.get(n, "") or run.result
    if together:
        for n in out.keys() - refused.keys():
            runs[n].moved.pop("backward", None)
    for call in case.calls:
        groups.leave(call.group)
    return out


def _take_steps(
    steps: Sequence[tuple[Does, int]], mine: dict[int, Call], runs: dict[int, Run], refused: dict[int, str]
) -> None:
    """Run the steps of this rank's calls. A refusal is recorded, and later steps of that call are skipped."""
    for does, n in steps:
        if does == "backward of all":
            _backward_of_all([run for m, run in runs.items() if m not in refused])
        elif n not in mine or n in refused:
            continue
        elif does == "backward":
            runs[n].backward()
        else:
            try:
                runs[n].forward(mine[n].mode)
            except DisagreementError:
                raise  # a bug: all ranks derive the same case, so they cannot disagree
            except ValueError as error:
                refused[n] = str(error) or type(error).__name__


def _backward_of_all(runs: Sequence[Run]) -> None:
    """Run one backward through the graphs of all calls."""
    outputs, gradients, leaves = [], [], []
    with_gradients = [run for run in runs if run.leaves]
    for run in with_gradients:
        own = run.upstream()
        outputs += own[0]
        gradients += own[1]
        leaves += list(run.leaves.values())
    found = list(torch.autograd.grad(outputs, leaves, gradients)) if with_gradients else []
    for run in with_gradients:
        run.store_gradients([found.pop(0) for _ in run.leaves])


def _in_threads(case: FuzzCase, mine: dict[int, Call], runs: dict[int, Run], refused: dict[int, str]) -> None:
    """Run the steps in the threads of the case; raise the first error of any thread."""
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            own = {n: call for n, call in mine.items() if call.thread == thread}
            _take_steps([step for step in case.steps if step[1] in own], own, runs, refused)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in sorted({c.thread for c in mine.values()})]
    for worker in workers:
        worker.start()
    # After an error, do not wait for the other threads: they may hang.
    while any(worker.is_alive() for worker in workers) and not errors:
        for worker in workers:
            worker.join(0.02)
    if errors:
        raise errors[0]


def judged(case: FuzzCase, parts: Sequence[dict[int, Part]]) -> Judged:
    """Compare every call of a case with the oracle and with the verifier's count of bytes.

    Args:
        case: The case.
        parts: For each rank, the outcomes of its calls by index.
    """
    counts = {"right": 0, "refused": 0, "missed": 0}
    messages, refusals = [], []
    share, worst = 0.0, ""
    for n, call in enumerate(case.calls):
        own = [parts[rank][n] for rank in call.group.ranks]
        refused_by = [part for part in own if isinstance(part, str)]
        if len(refused_by) == len(own):
            counts["refused"] += 1
            refusals.append(refused_by[0])
            continue
        try:
            if refused_by:
                raise AssertionError(f"refused by some ranks only: {refused_by[0]}")
            found = _judge_call(call, [part for part in own if not isinstance(part, str)])
        except (AssertionError, ValueError) as error:
            counts["missed"] += 1
            messages.append(f"call {n} of {len(case.calls)}: {error}")
            continue
        counts["right"] += 1
        share, worst = max((share, worst), found)
    outcome = "missed" if counts["missed"] else "refused" if counts["refused"] else "right"
    return Judged(
        *(case.number, outcome, counts, case.dimensions, share, worst, "; ".join(messages)), refusals=tuple(refusals)
    )


def _judge_call(call: Call, parts: Sequence[Result]) -> tuple[float, str]:
    """Return the largest error of a call over the allowed one, and its name; raise AssertionError if it is exceeded."""
    item = call.item
    results = [part[0] for part in parts]
    expected = {"out", *(("lse",) if item.lse else ())}
    if call.mode == "grad":
        expected |= {f"d{name}" for name in item.case.inputs(item.dtype) if name not in item.frozen}
    if any(result.keys() != expected for result in results):
        raise AssertionError(f"ranks returned {[sorted(result) for result in results]}, expected {sorted(expected)}")
    name, found = worst_error(item, parts)
    return found.error / found.allowed, name


def kind_of(refusal: str) -> str:
    """Return the message of a refusal without its digits, to count refusals by kind.

    >>> kind_of("heads=6 over 4 ranks: not a multiple")
    'heads=# over # ranks: not a multiple'
    """
    return re.sub(r"\d+(\.\d+)?", "#", refusal)[:160]
