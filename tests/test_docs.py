"""Run the Python blocks of the README and docs, compare them with dense attention, and redraw the pictures.

A block that calls attention runs twice: unchanged, and with the float64 functions of this file in place of meshflash's
functions. All calls, all tensors of the block and their `.grad` must agree. Calls in models are compared one by one.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import meshflash
from meshflash import Mask
from meshflash.cli import app
from meshflash.parallel import context
from meshflash.schedules.registry import names, unregister_schedule

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = {
    f"{page.name}-{n}": block
    for page in PAGES
    for n, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}
#: Tolerance between float32 kernels and float64 code, relative to the largest value.
CLOSE = 2e-5


def dense(q, k, v, *, mask=None, scale=None, softcap=None, q_offset=0, return_lse=False, return_plan=False, **given):
    """Compute attention by its definition, in float64; only `Mask.visible` comes from meshflash."""
    unknown = set(given) - {"mesh", "layout", "schedule", "verify", "kernel", "deterministic", "transport"}
    assert not unknown, f"dense attention in this test does not know {unknown}"
    queries, keys, values = (x.double().transpose(1, 2) for x in (q, k, v))
    ratio = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(ratio, dim=1) for x in (keys, values))
    scores = queries @ keys.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(q.shape[1])[:, None] + q_offset, torch.arange(k.shape[1])[None]
    seen = [(Mask.full() if mask is None else mask).visible(i.numpy(), j.numpy(), b) for b in range(q.shape[0])]
    scores = scores.masked_fill(~torch.stack([torch.as_tensor(rows) for rows in seen])[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = (weights @ values).transpose(1, 2).to(q.dtype)
    more = (lse.float(),) * return_lse + ("a plan",) * return_plan
    return (out, *more) if more else out


def dense_merge(parts):
    """Merge partial results by their LSE, in float64."""
    outs, lses = (torch.stack([x.double() for x in given]) for given in zip(*parts, strict=True))
    weights = torch.softmax(lses, dim=0).transpose(2, 3)[..., None]
    return (weights * outs).sum(0).to(parts[0][0].dtype), lses.logsumexp(0).float()


def dense_shard(x, layout, mesh=None, dim=1):
    """Return the tokens of rank 0, the only rank of these blocks."""
    return x.index_select(dim, torch.from_numpy(layout.positions(0)))


def dense_unshard(x, layout, mesh=None, dim=1):
    """Undo `dense_shard`."""
    return x.index_select(dim, torch.from_numpy(layout.positions(0)).argsort())


DENSE = {
    "attention": dense,
    "flash_attention": dense,
    "merge_partials": dense_merge,
    "shard": dense_shard,
    "unshard": dense_unshard,
}


def run(block, functions):
    """Run a block with these functions in place of meshflash's.

    Return the tensors that the calls received and returned, and the tensors among the block's variables, by name.
    """
    recorded_calls: dict[str, Any] = {}

    def recorded(name, function):
        def call(*args, **given):
            made = function(*args, **given)
            number = sum(key.startswith("call ") and key.endswith(" result") for key in recorded_calls)
            recorded_calls[f"call {number} {name} arguments"] = args
            recorded_calls[f"call {number} {name} result"] = made
            return made

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, function in functions.items():  # `from meshflash import name` reads this dictionary first
            patch.setitem(vars(meshflash), name, recorded(name, function))
        torch.manual_seed(0)
        variables: dict[str, Any] = {}
        exec(compile(block, "docs", "exec"), variables)
    return dict(tensors(recorded_calls)), dict(tensors(variables))


def tensors(x, path=""):
    """Yield (path, tensor) for every tensor in nested dicts, lists and tuples."""
    if isinstance(x, torch.Tensor):
        yield path, x
    elif isinstance(x, dict | list | tuple):
        for key, value in x.items() if isinstance(x, dict) else enumerate(x):
            yield from tensors(value, f"{path}.{key}" if path else str(key))


def assert_close(where, got, want):
    """Assert equal shapes, equal places of -inf, and values within `CLOSE`; `where` names the tensor in errors."""
    assert got.shape == want.shape, where
    got, want = got.detach().double(), want.detach().double()
    empty = want == -torch.inf
    assert torch.equal(got == -torch.inf, empty), where
    off = (got - want).masked_fill(empty, 0.0).abs().max() if want.numel() else 0.0
    assert off <= CLOSE * max(1.0, want.masked_fill(empty, 0.0).abs().max() if want.numel() else 0.0), (where, off)


def assert_same(got, want):
    """Assert that two runs have the same tensors with the same gradients."""
    assert got.keys() == want.keys()
    for where, x in want.items():
        assert_close(where, got[where], x)
        assert (got[where].requires_grad, got[where].is_leaf) == (x.requires_grad, x.is_leaf), where
        if x.is_leaf:
            assert (got[where].grad is None) == (x.grad is None), f"{where}.grad"
            if x.grad is not None:
                assert_close(f"{where}.grad", got[where].grad, x.grad)


def public():
    """Return the functions of meshflash that `DENSE` replaces, by name."""
    return {name: getattr(meshflash, name) for name in DENSE}


@pytest.fixture
def calls_in_models(monkeypatch):
    """Record inputs, output and gradients of every attention call inside a model."""
    calls = []

    def recorded(function):
        def call(*args, **given):
            inputs = [x.view_as(x) for x in args]  # a view, so that its hook sees the gradient of this use only
            made = function(*inputs, **given)
            record = {"inputs": [x.detach() for x in inputs], "given": given, "out": made.detach()}
            if made.requires_grad:
                made.register_hook(lambda dout: record.update(dout=dout))
                for n, x in enumerate(inputs):
                    x.register_hook(lambda grad, n=n: record.update({n: grad}))
            calls.append(record)
            return made

        return call

    for name in ("attention", "flash_attention"):
        monkeypatch.setattr(context, name, recorded(getattr(context, name)))
    return calls


def assert_dense(call):
    """Assert that a recorded call matches dense attention, and its gradients too if a backward ran."""
    exact = [x.requires_grad_() for x in call["inputs"]]
    want = dense(*exact, **call["given"])
    assert_close("attention in a model", call["out"], want)
    if "dout" in call:
        for n, grad in enumerate(torch.autograd.grad(want, exact, call["dout"])):
            assert_close("gradient of attention in a model", call[n], grad)


@pytest.mark.parametrize("page", BLOCKS)
def test_python_blocks_match_dense_attention(page, calls_in_models):
    block, before = BLOCKS[page], names()
    calls, variables = run(block, public())
    for name in set(names()) - set(before):
        unregister_schedule(name)
    assert bool(calls) == bool(re.search(r"\b(flash_)?attention\(", block))
    if calls:
        dense_calls, dense_variables = run(block, DENSE)
        assert_same(calls, dense_calls)
        assert_same(variables, dense_variables)
    for call in calls_in_models:
        assert_dense(call)
    assert any("dout" in call for call in calls_in_models) == ("GPT(" in block)


def test_comparison_fails_if_shard_returns_the_callers_tensor():
    block = BLOCKS["README.md-0"]
    wrong = run(block, public() | {"shard": lambda x, layout: x})
    with pytest.raises(AssertionError):
        assert_same(wrong[1], run(block, DENSE)[1])


def test_comparison_fails_if_a_gradient_is_missing():
    attention = meshflash.attention
    block = BLOCKS["README.md-0"]
    wrong = run(block, public() | {"attention": lambda q, k, v, **given: attention(q, k.detach(), v, **given)})
    with pytest.raises(AssertionError, match=r"k\.grad"):
        assert_same(wrong[1], run(block, DENSE)[1])


def test_docs_contain_python_blocks():
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda path: path.stem)
def test_committed_pictures_are_current(picture, tmp_path):
    pages = "\n".join(page.read_text() for page in PAGES)
    command = re.search(rf"`meshflash (draw .*? --svg docs/images/{picture.name})`", pages)
    assert command is not None
    command_arguments = shlex.split(command[1])
    result = CliRunner().invoke(app, [*command_arguments[:-1], str(tmp_path / "again.svg")], catch_exceptions=False)
    assert "proved right" in result.output
    assert (tmp_path / "again.svg").read_text() == picture.read_text()
