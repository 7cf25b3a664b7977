"""The processes of `python -m benchmarks integrations`: one imports the libraries and forks the ranks of each cell.

It runs in the interpreter that has the peers. Each line of its input names a cell, and each line of its output answers.
A cell has processes of its own, so that it may hang, and nothing that it leaves behind reaches another one.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.integration_cases import ACCUMULATION, batches_of, parts_of

#: The number of ranks.
WORLD = 2
#: Largest errors in float32, relative to the largest value, of what is right.
TOLERANCE = 1e-4
#: Seconds that other ranks get once one has answered with an error: they may wait for it.
GRACE = 3.0


def main() -> None:
    """Answer cells until the input ends. The argument names the module that has `PEERS`: a file or a module."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    module = _module(sys.argv[1])
    for line in sys.stdin:
        cell = json.loads(line)
        peer = module.PEERS[cell["peer"]]()
        answer = (
            _versions(peer) if "model" not in cell else _cell(peer, cell["model"], cell["feature"], cell["seconds"])
        )
        print(json.dumps(answer), file=answers, flush=True)


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("peers", name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _versions(peer: Any) -> dict[str, Any]:
    """Import a peer and return its versions, or why it cannot be imported."""
    try:
        peer.load()
    except ImportError as problem:
        return {"missing": first_line(problem)}
    return {"version": ", ".join(f"{name} {_version(name)}" for name in peer.packages)}


def _version(package: str) -> str:
    if package == "meshflash":  # it may run from its sources
        import meshflash

        return meshflash.__version__
    return version(package)


def _cell(peer: Any, model: str, feature: str, seconds: float) -> dict[str, Any]:
    """Run a cell in processes of its own and return the answer of each rank that answered in time."""
    _import_model(model)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(peer, model, feature, rank, Path(folder)) for rank in range(WORLD)]
        end = time.monotonic() + seconds
        answers: dict[int, Any] = {}
        while len(answers) < WORLD and time.monotonic() < end:
            time.sleep(0.01)
            for rank in set(range(WORLD)) - answers.keys():
                answer = _answer_of(ranks[rank], Path(folder, f"{rank}.json"))
                if answer is not None:
                    answers[rank] = answer
                    if answer.keys() & {"error", "died"}:
                        end = min(end, time.monotonic() + GRACE)
        for rank, process in enumerate(ranks):
            if "died" not in answers.get(rank, {}):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
    return {"answers": [answers.get(rank) for rank in range(WORLD)]}


@functools.cache
def _import_model(name: str) -> None:
    """Import the modules of a model, which takes seconds, before the ranks are forked."""
    import torch

    from benchmarks.tiny_models import build

    build(name, torch.float32)


def _answer_of(process: int, path: Path) -> dict[str, Any] | None:
    """Return what a rank has written, or how it died; None while it works."""
    if path.exists():
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer
    ended, status = os.waitpid(process, os.WNOHANG)
    if not ended:
        return None
    return {"died": signal.Signals(-code).name if (code := os.waitstatus_to_exitcode(status)) < 0 else f"exit {code}"}


def _fork(peer: Any, model: str, feature: str, rank: int, folder: Path) -> int:
    process = os.fork()
    if process:
        return process
    try:
        answer = _answer(peer, model, feature, rank, folder)
    except BaseException as problem:  # what a peer raises is its answer
        is_answer = type(problem).__name__ == "NeedsGpu"
        said = str(problem) if is_answer else first_line(problem)
        needs_gpu = is_answer or (bool(peer.inner) and said == _lacks(peer.inner, model))
        answer = {"error": said, "needs_gpu": needs_gpu}
    path = folder / f"{rank}.part"
    path.write_text(json.dumps(answer))
    path.rename(folder / f"{rank}.json")
    while True:  # the group's threads serve the other ranks until all are killed
        time.sleep(60)


def _answer(peer: Any, name: str, feature: str, rank: int, folder: Path) -> dict[str, Any]:
    """Return the errors of one rank, and whether one device can compute the model with the peer's kernel for CPUs."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.one_device import differences, num_labels, one_device
    from benchmarks.tiny_models import build

    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{WORLD}", LOCAL_WORLD_SIZE=f"{WORLD}")
    dist.init_process_group("gloo", store=_store(rank, folder / "port"), rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    model = build(name, torch.float32)
    batches = batches_of(model, name, feature)
    takes_count = _takes_count(model, batches[0])
    if feature == ACCUMULATION and not takes_count:
        return {"inapplicable": True}
    want = one_device(copy.deepcopy(model), parts_of(name, feature, copy.deepcopy(batches)))
    count = sum(num_labels(model, batch["labels"]) for batch in batches) if takes_count else None
    needs_gpu = bool(peer.inner and _lacks(peer.inner, name))
    got = peer.train(model, copy.deepcopy(batches), count, mesh)
    mask = batches[0].get("attention_mask")
    keep = mask.bool() if mask is not None and mask.shape == want[0].shape[:2] else None
    if got[0].shape != want[0].shape:
        return {"errors": {"logits": None}, "needs_gpu": needs_gpu}
    errors = differences(got, want, keep)
    finite = {what: error if math.isfinite(error) else None for what, error in errors.items()}
    return {"errors": finite, "needs_gpu": needs_gpu}


def _store(rank: int, path: Path) -> Any:
    """Return the store of a cell's ranks. Rank 0 serves it and writes its port to a file."""
    from torch.distributed import TCPStore

    if rank == 0:
        store = TCPStore("127.0.0.1", 0, WORLD, True, wait_for_workers=False)
        path.with_suffix(".part").write_text(str(store.port))
        path.with_suffix(".part").rename(path)
        return store
    while not path.exists():
        time.sleep(0.005)
    return TCPStore("127.0.0.1", int(path.read_text()), WORLD, False)


def _takes_count(model: Any, batch: dict[str, Any]) -> bool:
    """Return whether a model's loss is divided by `num_items_in_batch`."""
    import torch

    with torch.no_grad():
        once, twice = (model(**batch, num_items_in_batch=torch.tensor(n)).loss for n in (1, 2))
    return bool(once != twice)


def _lacks(implementation: str, name: str) -> str:
    """Return why one device cannot compute a model with an implementation of attention; empty if it can."""
    import torch

    from benchmarks.tiny_models import build

    model = build(name, torch.float32)
    batch = batches_of(model, name, "plain")[0]
    with torch.no_grad():
        want = model(**batch).logits
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation_internal = implementation
        try:
            got = model(**batch).logits
        except ValueError as problem:
            return first_line(problem)
    error = float((got - want).abs().max() / want.abs().max())
    return "" if error <= TOLERANCE else f"{implementation} on one device is off by {error:.1e}"


def first_line(problem: BaseException) -> str:
    """Return the type and the first line of an error.

    Args:
        problem: The error.
    """
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__


if __name__ == "__main__":
    main()
