"""Errors over a mesh: every rank raises in time, with a message that names the rank and the remedy."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as _distributed

import meshflash
from meshflash import Layout, Mask, attention
from meshflash.comm.handshake import DisagreementError
from meshflash.comm.transports.contract import TransportError
from meshflash.engine.group_context import MissingRankError, group_context
from pool import WorkerError

dist: Any = _distributed  # the stubs of torch miss some of its exports

CAUSAL = Mask.causal()
TOKENS = 12
WORLD = 3
TIMEOUTS = ("0", "-3", "soon", "nan", "inf")


@contextmanager
def timeout_seconds(limit: float) -> Iterator[None]:
    """Set MESHFLASH_TIMEOUT to `limit` seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHFLASH_TIMEOUT", str(limit))
        yield


def call(world, tokens=None, batch=1, heads=2, kv_heads=2, dim=8, value_dim=None, dtype=torch.float32, **options):
    """Call attention with a shard of ones; `tokens` is the length of the shard, 4 by default."""
    tokens = 4 if tokens is None else tokens
    q = torch.ones(batch, tokens, heads, dim, dtype=dtype)
    k = torch.ones(batch, tokens, kv_heads, dim, dtype=dtype)
    v = torch.ones(batch, tokens, kv_heads, value_dim or dim, dtype=dtype)
    given: dict[str, Any] = dict(layout=Layout.contiguous(4 * world, world), schedule="ring", mask=CAUSAL)
    return attention(q, k, v, **(given | options))


def raised_message(kind, function, *arguments, **options):
    """Assert that a call raises `kind`; return the message and the seconds until it was raised."""
    began = time.monotonic()
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    return str(error.value), time.monotonic() - began


#: Calls in which one rank differs: (arguments of all ranks, changed arguments of that rank, expected message).
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": ({}, dict(dtype=torch.float64), r'dtype: rank 0 has "torch.float32", rank {} has "torch.float64"'),
    "batch": ({}, dict(batch=2), r"batch: rank 0 has 1, rank {} has 2"),
    "heads": ({}, dict(heads=4), r"heads: rank 0 has 2, rank {} has 4"),
    "key heads": ({}, dict(kv_heads=1), r"key heads: rank 0 has 2, rank {} has 1"),
    "dim": (dict(scale=1.0, value_dim=8), dict(dim=16), r"dim: rank 0 has 8, rank {} has 16"),
    "value dim": ({}, dict(value_dim=4), r"value dim: rank 0 has 8, rank {} has 4"),
    "mask": ({}, dict(mask=None), r'mask: rank 0 has "causal", rank {} has "full"'),
    "window": (dict(mask=Mask.window(3, 0)), dict(mask=Mask.window(2, 0)), r"mask: rank 0 has .*, rank {} has "),
    "documents": (
        dict(mask=CAUSAL & Mask.documents([5, 7])),
        dict(mask=CAUSAL & Mask.documents([6, 6])),
        r"mask's documents and slices: rank 0 has .*, rank {} has ",
    ),
    "slices": (
        dict(mask=CAUSAL | Mask.slices([(1, 5)], [(1, 5)])),
        dict(mask=CAUSAL | Mask.slices([(1, 6)], [(1, 6)])),
        r"mask's documents and slices: rank 0 has .*, rank {} has ",
    ),
    "documents of a tensor": (
        dict(mask=CAUSAL & Mask.documents(torch.tensor([5, 7]))),
        dict(mask=CAUSAL & Mask.documents(torch.tensor([5, 5, 2]))),
        r"mask.*: rank 0 has .*, rank {} has ",
    ),
    "layout": (
        {},
        dict(layout=Layout.zigzag(TOKENS, WORLD)),
        r'layout: rank 0 has "contiguous 12 3", rank {} has "zigzag 12 3"',
    ),
    "key layout": (
        {},
        dict(k_layout=Layout.striped(TOKENS, WORLD)),
        r'key layout: rank 0 has "contiguous 12 3", rank {} has "striped 12 3"',
    ),
    "no layout": (dict(layout=None), dict(tokens=5), r'layout: rank 0 has "contiguous 12 3", rank {} has "con.* 15 3"'),
    "schedule": ({}, dict(schedule="allgather"), r'schedule: rank 0 has "ring", rank {} has "allgather"'),
    "schedule's option": (
        dict(schedule="allgather(head_stride=1)"),
        dict(schedule="allgather"),
        r'schedule: rank 0 has "allgather\(head_stride=1\)", rank {} has "allgather"',
    ),
    "scale": ({}, dict(scale=0.5), r"scale: rank 0 has 0.35\d+, rank {} has 0.5"),
    "softcap": ({}, dict(softcap=2.0), r"softcap: rank 0 has 0.0, rank {} has 2.0"),
    "dropout": (dict(seed=1), dict(dropout=0.1), r"dropout: rank 0 has 0.0, rank {} has 0.1"),
    "seed": (dict(dropout=0.1, seed=1), dict(seed=2), r"seed: rank 0 has 1, rank {} has 2"),
    "q_offset": ({}, dict(q_offset=3), r"q_offset: rank 0 has 0, rank {} has 3"),
    "batch_offset": ({}, dict(batch_offset=3), r"batch_offset: rank 0 has 0, rank {} has 3"),
    "head_offset": ({}, dict(head_offset=3), r"head_offset: rank 0 has 0, rank {} has 3"),
    "slopes": ({}, dict(alibi_slopes=torch.ones(2)), r'alibi_slopes: rank 0 has "none", rank {} has "torch.float32 \['),
    "slopes' values": (
        dict(alibi_slopes=torch.ones(2)),
        dict(alibi_slopes=torch.zeros(2)),
        r"alibi_slopes: rank 0 has .*, rank {} has ",
    ),
    "sinks": (
        {},
        dict(sink_logits=torch.ones(2)),
        r'sink_logits: rank 0 has "none", rank {} has "torch.float32 \[2\] ',
    ),
    "no sinks": (dict(sink_logits=torch.ones(2)), dict(sink_logits=None), r'sink_logits: .*, rank {} has "none"'),
    "reduce_dtype": ({}, dict(reduce_dtype=torch.bfloat16), r'reduce_dtype: rank 0 has "", rank {} has "bfloat16"'),
    "return_lse of a schedule that sends the LSE": (
        dict(schedule="ulysses"),
        dict(return_lse=True),
        r"return_lse: rank 0 has false, rank {} has true",
    ),
    "kernel": ({}, dict(kernel="tiled"), r'kernel: rank 0 has "auto", rank {} has "tiled"'),
    "deterministic": ({}, dict(deterministic=True), r"deterministic: rank 0 has false, rank {} has true"),
    "version": ({}, dict(version="9.9"), r'version: rank 0 has ".*", rank {} has "9.9"'),
}


def disagree(rank, world, group, bad):
    """Make every call of `DIFFERENCES` with rank `bad` as the one that differs; return the messages."""
    messages = {}
    for name, (everyone, one, _) in DIFFERENCES.items():
        options = everyone | (one if rank == bad else {})
        with timeout_seconds(10), pytest.MonkeyPatch.context() as patch:
            patch.setattr(meshflash, "__version__", options.pop("version", meshflash.__version__))
            messages[name], _ = raised_message(DisagreementError, call, world, **options)
    call(world)  # a call that agrees succeeds afterwards
    return messages


@pytest.fixture(scope="module")
def differences(pool):
    """Return the messages of all ranks, keyed by the rank that differs."""
    return {bad: pool.run(WORLD, disagree, bad) for bad in (1, 2)}


@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_disagreement_names_rank_and_field_on_every_rank(differences, name, bad):
    errors = [messages[name] for messages in differences[bad]]
    assert errors == [errors[0]] * WORLD
    assert_matches(r"^ranks disagree in " + DIFFERENCES[name][2].format(bad), errors[0])
    assert errors[0].count("all ranks of a group must make the same call, each with its own shard") == 1


def assert_matches(pattern, text):
    """Assert that the pattern occurs in the text."""
    assert re.search(pattern, text), f"{text!r} does not match {pattern!r}"


def rank_0_differs(rank, world, group):
    """Return the message of a call in which rank 0 differs from all other ranks."""
    return raised_message(DisagreementError, call, world, scale=0.5 if rank == 0 else 0.25)[0]


def test_disagreement_of_rank_0_is_reported_against_rank_1(pool):
    errors = pool.run(WORLD, rank_0_differs)
    want = "ranks disagree in scale: rank 0 has 0.5, rank 1 has 0.25"
    assert all(text.startswith(want) for text in errors)


def disagree_in_sub_group(rank, world, group):
    """Return the message of a disagreement within a group of two of the four ranks."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return raised_message(DisagreementError, call, 2, mesh=half, scale=float(rank + 1))[0]


def test_messages_use_global_rank_numbers(pool):
    errors = pool.run(4, disagree_in_sub_group)
    assert [text.partition(";")[0] for text in errors] == [
        *["ranks disagree in scale: rank 0 has 1.0, rank 1 has 2.0"] * 2,
        *["ranks disagree in scale: rank 2 has 3.0, rank 3 has 4.0"] * 2,
    ]


def call_with_wrong_length(rank, world, group, bad):
    """Return the messages of a wrong shard length and of wrong documents on rank `bad`."""
    errors = [raised_message(ValueError, call, world, tokens=5 if rank == bad else 4)[0]]
    errors.append(raised_message(ValueError, call, world, mask=Mask.documents([7] if rank == bad else [8]))[0])
    call(world)
    return errors


@pytest.mark.parametrize("bad", [0, 1])
def test_wrong_length_on_one_rank_raises_on_all_ranks(pool, bad):
    for rank, (length, documents) in enumerate(pool.run(2, call_with_wrong_length, bad)):
        prefix = "" if rank == bad else f"rank {bad} raised: "
        layout = "its layout (contiguous, 8 tokens over 2 ranks) gives it 4"
        assert length == f"{prefix}q has 5 tokens on rank {bad} of the group; {layout}"
        assert documents.startswith(f"{prefix}documents(lengths): 7 tokens in the documents, 8 in the sequence")


def repeat_with_wrong_length(rank, world, group):
    """Return the message and the wait of a repeated call in which rank 1 has a wrong length."""
    with timeout_seconds(1.0):
        call(world)
        return raised_message(ValueError if rank else TransportError, call, world, tokens=5 if rank else 4)


def test_wrong_length_in_a_repeated_call_raises_on_all_ranks(pool):
    (lost, waited), (wrong, _) = pool.run(2, repeat_with_wrong_length)
    assert wrong.startswith("q has 5 tokens on rank 1 of the group; its layout (contiguous, 8 tokens over 2 ranks)")
    assert lost.startswith("rank 1 did not join forward pass 2 of the process group: it raised ValueError: q has 5")
    assert waited < 10


def skip_backward(rank, world, group):
    """Return the message and the wait of a backward that rank 1 does not run."""
    with timeout_seconds(1.0):
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        out = attention(x, x, x, schedule="zigzag")
        if rank == 1:
            return "", 0.0
        return raised_message(TransportError, out.sum().backward)


def test_rank_that_skips_the_backward_is_named(pool):
    for rank, (error, waited) in enumerate(pool.run(3, skip_backward)):
        if rank != 1:
            assert error.startswith(
                "rank 1 did not join backward pass 2 of the process group: it finished forward pass 1"
            )
            assert "all ranks must call backward, or none" in error
            assert waited < 10


def forward_instead_of_backward(rank, world, group):
    """Rank 1 runs another forward; it must not receive the messages of the other rank's backward as its own."""
    with timeout_seconds(1.0):
        x = torch.randn(1, 4, 2, 8, requires_grad=True)
        out = attention(x, x, x, schedule="allgather")
        if rank == 1:
            return raised_message(TransportError, attention, x, x, x, schedule="allgather")[0]
        return raised_message(TransportError, out.sum().backward)[0]


def test_forward_and_backward_messages_are_never_confused(pool):
    errors = pool.run(2, forward_instead_of_backward)
    assert sum("did not join" in text for text in errors) == 2


def call_without_rank(rank, world, group, absent):
    """Return the message and the wait of a call that rank `absent` does not make."""
    with timeout_seconds(0.7):
        if rank == absent:
            return "", 0.0
        return raised_message(MissingRankError, call, world)


@pytest.mark.parametrize("absent", [0, 2])
def test_rank_that_never_calls_is_named(pool, absent):
    for rank, (error, waited) in enumerate(pool.run(WORLD, call_without_rank, absent)):
        if rank != absent:
            assert error.startswith(f"rank {absent} did not come to handshake 0 within 0.7 s. It may have raised,")
            assert "look at its output first. MESHFLASH_TIMEOUT sets the seconds" in error
            assert waited < 10


def call_late(rank, world, group):
    """Return the message of a call that rank 1 makes after the timeout; the next call succeeds."""
    with timeout_seconds(0.5):
        if rank == 1:
            time.sleep(0.8)
        first = raised_message(MissingRankError, call, world)[0]
    with timeout_seconds(5):
        call(world)
    return first


def test_late_rank_gets_the_error_and_the_next_call_works(pool):
    errors = pool.run(2, call_late)
    assert all(text.startswith("rank 1 did not come to handshake 0 within 0.5 s") for text in errors)


def repeat_without_rank_1(rank, world, group, options):
    """Return the message and the wait of a repeated call that rank 1 does not make."""
    with timeout_seconds(2.0):
        call(world, **options)
        dist.barrier()
        return ("", 0.0) if rank else raised_message(TransportError, call, world, **options)


@pytest.mark.parametrize(
    ("schedule", "mask"),
    [("ring", CAUSAL), ("allgather", CAUSAL), ("allgather", None)],
    ids=["point-to-point", "point-to-point gather", "collective"],
)
def test_missing_rank_in_a_repeated_call_is_named(pool, schedule, mask):
    (error, waited), _ = pool.run(2, repeat_without_rank_1, dict(schedule=schedule, mask=mask))
    assert error.startswith(
        "rank 1 did not join forward pass 2 of the process group: it finished forward pass 1 and has made no call since"
    )
    assert error.endswith("look at its output first")
    assert waited < 10


def call_with_other_arguments(rank, world, group):
    """Return message and wait of a call that is new on rank 0 and repeated on rank 1."""
    with timeout_seconds(2.0):
        call(world)
        if rank:
            return raised_message((TransportError, MissingRankError), call, world)
        return raised_message((TransportError, MissingRankError), call, world, scale=0.5)


def test_new_call_beside_a_cached_call_raises_within_the_timeout(pool):
    (new, waited), (cached, also_waited) = pool.run(2, call_with_other_arguments)
    found_by_cached = "rank 0 did not join forward pass 2 of the process group: it is in handshake 1"
    found_by_new = "rank 1 did not come to handshake 1 within 2 s. It may have raised, been ended, or be in"
    assert new.startswith((found_by_new, found_by_cached))  # both wait 2 s; the first one tells the other
    assert cached.startswith(found_by_cached)
    assert "called attention with other arguments" in cached
    assert max(waited, also_waited) < 10


def verify_on_rank_0(rank, world, group):
    """Return the message and the wait of a call with verify=True on rank 0 only."""
    with timeout_seconds(0.7):
        call(world)
        if rank:
            call(world)
            return "", 0.0
        return raised_message(MissingRankError, call, world, verify=True)


def test_verify_on_one_rank_raises_within_the_timeout(pool):
    (error, waited), _ = pool.run(2, verify_on_rank_0)
    assert error.startswith("rank 1 did not come to handshake 1 within 0.7 s")
    assert "pass verify=True on all ranks, or on none" in error
    assert waited < 10


def die_in_repeated_call(rank, world, group):
    """Repeat a call; rank 1 exits before its third call."""
    with timeout_seconds(30):
        for n in range(4):
            if rank == 1 and n == 2:
                os._exit(3)
            call(world)


@pytest.mark.slow
def test_killed_rank_in_a_repeated_call_is_named_at_once(pool):
    began = time.monotonic()
    with pytest.raises(WorkerError) as error:
        pool.run(2, die_in_repeated_call, timeout=20)
    text = str(error.value)
    assert text.startswith("rank 1 died with exit code 3")
    assert_matches(r"TransportError: rank 1 was lost", text)
    assert time.monotonic() - began < 10


#: Calls that are invalid on all ranks: (arguments, expected message).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layout's type": (dict(layout="zigzag"), r"layout: expected a meshflash.Layout, such as .*; got 'zigzag'"),
    "k_layout's type": (dict(k_layout=[1]), r"k_layout: expected a meshflash.Layout, such as .*; got \[1\]"),
    "layout's world": (dict(layout=Layout.zigzag(8, 4)), r"layout: it is for 4 ranks, the group has 2"),
    "k_layout's world": (dict(k_layout=Layout.zigzag(8, 3)), r"k_layout: it is for 3 ranks, the group has 2"),
    "schedule": (dict(schedule="rings"), r"schedule='rings': expected one of auto, "),
    "schedule's type": (dict(schedule=3), r"schedule=3: expected a name, or name\(option=value\)"),
    "option": (dict(schedule="ring(x=1)"), r"ring has no option 'x'; it has: none"),
    "other option": (dict(schedule="allgather(stride=1)"), r"no option 'stride'; it has: head_stride"),
    "head_stride": (dict(schedule="allgather(head_stride=-1)"), r"head_stride='-1', expected a number >= 0"),
    "head_stride's type": (dict(schedule="allgather(head_stride=x)"), r"head_stride='x', expected a number >= 0"),
    "reduce_dtype": (
        dict(reduce_dtype=torch.int8),
        r"reduce_dtype=torch.int8: expected one of the torch dtypes",
    ),
    "reduce_dtype's type": (dict(reduce_dtype="float32"), r"reduce_dtype='float32': expected one of the torch dtypes"),
    "mesh": (dict(mesh="cpu"), r"mesh: expected a process group that this rank is in, or a DeviceMesh, .*got str"),
    "mesh's number": (dict(mesh=0), r"mesh: expected a process group that this rank is in, .*got int"),
    "key tokens": (
        dict(k_layout=Layout.zigzag(6, 2)),
        r"k has 4 tokens on rank \d of the group; its layout \(zigzag",
    ),
    "no seed": (dict(dropout=0.5), r"seed: give the same seed on all ranks"),
    "mask": (dict(mask=Mask.documents([3])), r"3 tokens in the documents, 8 in"),
    "kernel": (
        dict(kernel="vendor", softcap=1.0),
        r'kernel="vendor" does not support .*; supported here: (triton, )?tiled',
    ),
}


def make_invalid_calls(rank, world, group):
    """Return the messages of all invalid calls, by name."""
    with timeout_seconds(10):
        errors = {name: raised_message(ValueError, call, world, **options)[0] for name, (options, _) in REFUSED.items()}
    grid = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    errors["grid"] = raised_message(ValueError, call, world, mesh=grid)[0]
    errors["another inner"] = raised_message(ValueError, call, world, mesh=grid, schedule="hybrid(inner=1)")[0]
    cube = dist.init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("pp", "dp", "cp"))
    errors["cube"] = raised_message(ValueError, call, world, mesh=cube)[0]
    errors["no names"] = raised_message(ValueError, call, world, mesh=dist.init_device_mesh("cpu", (2, 1, 1)))[0]
    foreign = dist.new_group([0])
    errors["foreign"] = raised_message(ValueError, call, world, mesh=foreign)[0] if rank else ""
    for text in TIMEOUTS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MESHFLASH_TIMEOUT", text)
            errors[f"timeout {text}"] = raised_message(ValueError, call, world, scale=0.1)[0]
    call(world)
    return errors


@pytest.fixture(scope="module")
def refused(pool):
    """Return the messages of every rank for the invalid calls, by name."""
    return pool.run(2, make_invalid_calls)


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_raise_with_the_expected_values(refused, name):
    for errors in refused:
        assert_matches(REFUSED[name][1], errors[name])


def test_mesh_with_more_dimensions_than_the_schedule_is_refused(refused):
    wanted = r"mesh: it has 3 dimensions, and a sequence is spread over one or two; pass a sub-mesh: "
    for errors in refused:
        assert_matches(
            r"schedule='ring' runs over one axis, .*mesh\[\"cp\"\].* with double_ring, hybrid$", errors["grid"]
        )
        assert_matches(r"inner=1, but mesh has 2 ranks in its inner axis$", errors["another inner"])
        assert_matches(wanted + r'mesh\["pp"\]$', errors["cube"])
        assert_matches(wanted + r'init_device_mesh\(..., mesh_dim_names=\("cp",\)\)\["cp"\]$', errors["no names"])


def test_group_without_this_rank_is_refused(refused):
    assert_matches(r"mesh: expected a process group that this rank is in", refused[1]["foreign"])


@pytest.mark.parametrize("text", TIMEOUTS)
def test_timeout_must_be_a_number_of_seconds(refused, text):
    for errors in refused:
        assert errors[f"timeout {text}"] == f"MESHFLASH_TIMEOUT={text!r}: expected a number of seconds > 0"


def count_handshakes(rank, world, group):
    """Assert that a call with new arguments makes a handshake, and a repeated call makes none."""
    context = group_context(group.group_name)
    call(world)
    call(world)
    assert context.handshakes == 1
    call(world, scale=0.5)
    for scale in (None, 0.5):
        call(world, scale=scale)
    call(world, dropout=0.1, seed=1)
    call(world, dropout=0.1, seed=2)
    assert context.handshakes == 3


def test_handshake_runs_once_for_each_kind_of_call(pool):
    pool.run(2, count_handshakes)


def verify_nonfinite(rank, world, group, bad, name, value):
    """Shard a sequence over ranks 1 and 2 only; the message must use their global rank numbers."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return ""
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {x: torch.randn(1, 40, 2, 8, generator=generator) for x in ("q", "k", "v")}
    given: dict[str, Any] = dict(mesh=group, mask=CAUSAL, verify=True, sink_logits=torch.tensor([-torch.inf, 0.0]))
    attention(**inputs, **given)
    if rank == bad:
        inputs[name][0, 3, 1, :2] = value
    return raised_message(ValueError, attention, **inputs, **given)[0]


@pytest.mark.parametrize(("bad", "name", "value"), [(2, "k", torch.nan), (1, "q", torch.nan), (2, "v", -torch.inf)])
def test_verify_names_the_rank_and_tensor_with_nonfinite_values(pool, bad, name, value):
    _, *messages = pool.run(WORLD, verify_nonfinite, bad, name, value)
    assert messages[0] == messages[1]
    assert f"verify: {name} of rank {bad} holds 2 {'inf' if value == -torch.inf else 'NaN'}." in messages[0]


def test_verify_names_the_nonfinite_tensor_on_a_single_rank():
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"verify: v of rank 0 holds 64 NaN\. .*cannot be checked"):
        attention(x, x, x * torch.nan, verify=True)
    with pytest.raises(ValueError, match=r"verify: q of rank 0 holds 64 inf; k of rank 0 holds 64 inf\. "):
        attention(x + torch.inf, x - torch.inf, x, verify=True)
