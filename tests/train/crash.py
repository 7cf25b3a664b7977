"""Jobs that save checkpoints until they are killed. Torch is imported once; each job is forked before it computes.

A line of JSON on stdin starts a job, and its processes' ids are the answer; the line "wait" is answered with how they
ended. A checkpoint's weights, optimizer and state all hold one number, by which a test knows that they belong together.
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

dist: Any = _distributed  # torch does not declare all that it exports here

#: The audit events of file operations.
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=0.0)


@torch.no_grad()
def fill(model: nn.Module, optimizer: torch.optim.Optimizer, number: float) -> None:
    for weight in model.parameters():
        weight.fill_(number)
        optimizer.state[weight] = {
            "step": torch.tensor(number),
            "exp_avg": torch.full_like(weight, number),
            "exp_avg_sq": torch.full_like(weight, number),
        }
    optimizer.param_groups[0]["lr"] = number


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[float]:
    """Return all distinct values of a loaded model and its optimizer."""
    found = {optimizer.param_groups[0]["lr"]}
    for weight in model.parameters():
        for x in (weight, *optimizer.state[weight].values()):
            found |= set(x.detach().unique().tolist())
    return found


def kill_at(number: int) -> None:
    """Kill this process with SIGKILL before its n-th file operation from now on."""
    left = itertools.count(1)

    def hook(event: str, args: Any) -> None:
        if event in EVENTS and next(left) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def job(rank: int, folder: str, world: int, steps: list[int], keep: int, log: str, store: str, at: dict[str, int]):
    """Save these steps, the first of them with the number 10 * step, the next 10 * step + 1, and so on.

    After a list of one step [n] come n + 1, n + 2, ... without end. What begins and what is done goes to the log.
    """
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    checkpoints = Checkpoints(folder, keep=keep)
    model, optimizer = made()
    endless = len(steps) == 1
    if endless and checkpoints.latest() is not None:
        checkpoints.load(model, optimizer)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    if str(rank) in at:
        kill_at(at[str(rank)])
    for n, step in enumerate(itertools.count(steps[0] + 1) if endless else steps):
        if rank == 0:
            os.write(handle, b"begin %d\n" % step)
        number = 10.0 * step + (0 if endless else n)
        fill(model, optimizer, number)
        checkpoints.save(step, model, optimizer, {"number": number})
        fill(model, optimizer, -1.0)
        if rank == 0 and n and endless:
            os.write(handle, b"done %d\n" % (step - 1))  # a save waits for the one before
    checkpoints.wait()


def main() -> None:
    pids: list[int] = []
    for line in sys.stdin:
        if line.strip() == "wait":
            print(json.dumps([os.waitpid(pid, 0)[1] for pid in pids]), flush=True)
            continue
        asked = json.loads(line)
        pids = []
        for rank in range(asked["world"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    job(rank, **asked)
                    code = 0
                except BaseException:
                    Path(asked["log"]).with_suffix(f".error{rank}").write_text(traceback.format_exc())
                finally:
                    os._exit(code)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
