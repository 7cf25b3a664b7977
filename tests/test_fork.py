"""Forked children: they may call `flash_attention`, and may not use the process groups of their parent."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import traceback

import pytest
import torch
from torch import distributed

from meshflash import Layout, Mask, attention, flash_attention, init, shutdown, unshard
from meshflash.engine.cache import cache
from meshflash.runtime import liveness
from meshflash.runtime.state import ForkedGroupError, state

CAUSAL = Mask.causal()
X = torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="CUDA does not work in a forked child"
)


def in_forked_child(function, timeout=20.0):
    """Call a function in a forked child; return its result, or fail with its error or after the timeout."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = pickle.dumps((function(), ""))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        os.write(writing, answer)
        os._exit(0)  # without the exit functions and destructors of the parent
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], timeout)
    with os.fdopen(reading, "rb") as pipe:
        if not ready:
            os.kill(child, signal.SIGKILL)
        answer = pipe.read()
    os.waitpid(child, 0)
    assert ready, f"the child did not answer within {timeout:g} s"
    result, error = pickle.loads(answer)
    assert not error, error
    return result


def attend(tokens):
    """Return output and gradient of a call of this many tokens, as lists."""
    x = X[:, :tokens].clone().requires_grad_()
    out = flash_attention(x, x, x, mask=CAUSAL)
    return out.tolist(), torch.autograd.grad(out.sum(), x)[0].tolist()


def test_forked_child_runs_flash_attention_that_its_parent_has_run():
    want = [attend(tokens) for tokens in (5, 12)]
    assert in_forked_child(lambda: [attend(tokens) for tokens in (5, 12)]) == want
    assert attend(7) == in_forked_child(lambda: attend(7))


def test_forked_child_runs_while_another_thread_of_the_parent_holds_the_locks():
    want = attend(12)
    held, forked = threading.Event(), threading.Event()

    def hold():
        with cache._lock, state.lock, liveness._lock:
            held.set()
            forked.wait(30)

    def call_and_shut_down():
        found = attend(12)
        shutdown()
        liveness.close()
        return found

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert in_forked_child(call_and_shut_down) == want
    finally:
        forked.set()
        thread.join()


def error_of(function):
    """Return the message of the ForkedGroupError that a function raises."""
    with pytest.raises(ForkedGroupError) as raised:
        function()
    return str(raised.value)


def fork_between_calls(rank, world, group, called_before):
    """Fork a rank of a job; return the errors of all uses of its group in the child, after using it in the parent."""
    x = X[:, :4].clone().requires_grad_()

    def call(**options):
        return attention(x, x, x, mask=CAUSAL, schedule="zigzag", **options)

    out = call() if called_before else None

    def use_the_group():
        errors = [error_of(call), error_of(init), error_of(lambda: unshard(x, Layout.contiguous(8, 2)))]
        if out is not None:
            errors.append(error_of(lambda: torch.autograd.grad(out.sum(), x)))
        flash_attention(x, x, x, mask=CAUSAL)
        shutdown()  # leaves the connections of the parent alone
        return errors

    errors = in_forked_child(use_the_group)
    if out is not None:
        out.sum().backward()
    call(verify=True)
    distributed.barrier()
    return errors


@pytest.mark.parametrize("called_before", [True, False])
def test_forked_child_is_refused_the_groups_of_its_parent_whose_calls_go_on(pool, called_before):
    for errors in pool.run(2, fork_between_calls, called_before):
        assert len(errors) == 3 + called_before
        for error in errors:
            assert "was forked from process" in error
            assert '"spawn" or "forkserver"' in error
