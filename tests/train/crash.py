"""Jobs that save checkpoints until they are killed. Torch is imported once; each job is forked before it computes.

A line of JSON on stdin starts a job; the answer is the list of its process ids. The line "wait" waits for them; the
answer is the list of their exit statuses. The weights, optimizer and state of a checkpoint all hold a single value, so
that a test notices parts of different checkpoints.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed as _distributed
from torch import nn

from meshflash.train.checkpoint import Checkpoints

dist: Any = _distributed  # the stubs of torch miss some of its exports

#: The audit events of file operations.
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model and its optimizer."""
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.0)


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set all weights, the optimizer state and the learning rate to one value."""
    for weight in model.parameters():
        weight.fill_(value)
        optimizer.state[weight] = {
            "step": torch.tensor(value),
            "exp_avg": torch.full_like(weight, value),
            "exp_avg_sq": torch.full_like(weight, value),
        }
    optimizer.param_groups[0]["lr"] = value


def distinct_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    """Return all distinct values of a loaded model and its optimizer."""
    found = {optimizer.param_groups[0]["lr"]}
    for weight in model.parameters():
        for x in (weight, *optimizer.state[weight].values()):
            found |= set(x.detach().unique().tolist())
    return found


def kill_at(operation: int) -> None:
    """Kill this process with SIGKILL before file operation `operation`, counted from now on."""
    operations = itertools.count(1)

    def hook(event: str, args: Any) -> None:
        if event in EVENTS and next(operations) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def job(
    rank: int,
    folder: str,
    world: int,
    steps: list[int],
    keep: int,
    log: str,
    store: str,
    kill_operations: dict[str, int],
):
    """Save these steps, the first of them with the value 10 * step, the next with 10 * step + 1, and so on.

    With a single step [n], save n + 1, n + 2, ... without end. The log records when a save begins and when it is done.
    """
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    checkpoints = Checkpoints(folder, keep=keep)
    model, optimizer = build()
    endless = len(steps) == 1
    if endless and checkpoints.latest() is not None:
        checkpoints.load(model, optimizer)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if str(rank) in kill_operations:
        kill_at(kill_operations[str(rank)])
    for n, step in enumerate(itertools.count(steps[0] + 1) if endless else steps):
        if rank == 0:
            os.write(handle, b"begin %d\n" % step)
        value = 10.0 * step + (0 if endless else n)
        fill(model, optimizer, value)
        checkpoints.save(step, model, optimizer, {"value": value})
        fill(model, optimizer, -1.0)
        if rank == 0 and n and endless:
            os.write(handle, b"done %d\n" % (step - 1))  # a save first waits for the previous one
    checkpoints.wait()


def main() -> None:
    """Serve jobs from stdin until it closes."""
    pids: list[int] = []
    for line in sys.stdin:
        if line.strip() == "wait":
            print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)
            continue
        request = json.loads(line)
        pids = []
        for rank in range(request["world"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    job(rank, **request)
                    code = 0
                except BaseException:
                    Path(request["log"]).with_suffix(f".error{rank}").write_text(traceback.format_exc())
                finally:
                    os._exit(code)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
