"""Programs as data: their text, JSON, byte counts, and packed messages."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from meshflash.core.layout import Layout
from meshflash.core.mask import Mask
from meshflash.core.problem import Problem
from meshflash.core.program import (
    KINDS,
    STEPS,
    Add,
    Attend,
    AttendGrad,
    Buffer,
    Clear,
    Copy,
    Delta,
    Direction,
    Dtype,
    Field,
    Finish,
    Part,
    Post,
    Program,
    Sizes,
    Slice,
    Step,
    Wait,
    slices,
)
from meshflash.schedules.registry import build, default_layout

SCHEDULES = ("ring", "zigzag", "striped", "allgather", "allgather(head_stride=1)", "ulysses")
MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.window(3, 2),
    "documents": Mask.causal() & Mask.documents([5, 8]),
}
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def slice_of(name: str, rows: tuple[int, int] = (0, 4), heads: tuple[int, int] = (0, 2)) -> Slice:
    return Slice(name, rows, heads)


A, B, C, D, E, F = (slice_of(name) for name in "abcdef")
AT = (range(0, 8, 2),)
#: A step of every type, with its text and the slices that it accesses.
EXAMPLES: list[tuple[Step, str, list[tuple[str, str]]]] = [
    (
        Attend(A, B, C, AT, AT, (0, 2)),
        "attend a[0:4, 0:2] x b[0:4, 0:2] -> c[0:4, 0:2]",
        [("a", "read"), ("b", "read"), ("c", "write")],
    ),
    (
        Attend(A, B, C, AT, AT, (0, 2), carry=True),
        "attend carry a[0:4, 0:2] x b[0:4, 0:2] -> c[0:4, 0:2]",
        [("a", "read"), ("b", "read"), ("c", "update")],
    ),
    (
        Attend(A, B, C, AT, AT, (0, 2), final=True),
        "attend final a[0:4, 0:2] x b[0:4, 0:2] -> c[0:4, 0:2]",
        [("a", "read"), ("b", "read"), ("c", "write")],
    ),
    (
        AttendGrad(A, B, F, C, D, E, AT, AT, (0, 2), add_dq=True),
        "attend_grad a[0:4, 0:2] x c[0:4, 0:2]: d[0:4, 0:2] +=, e[0:4, 0:2] =",
        [("a", "read"), ("b", "read"), ("f", "read"), ("c", "read"), ("d", "update"), ("e", "write")],
    ),
    (
        AttendGrad(A, B, F, C, D, E, AT, AT, (0, 2), add_dkv=True),
        "attend_grad a[0:4, 0:2] x c[0:4, 0:2]: d[0:4, 0:2] =, e[0:4, 0:2] +=",
        [("a", "read"), ("b", "read"), ("f", "read"), ("c", "read"), ("d", "write"), ("e", "update")],
    ),
    (
        Post("kv 1", (Part(1, A),), (Part(2, B),)),
        "post kv 1: a[0:4, 0:2] -> rank 1, b[0:4, 0:2] <- rank 2",
        [("a", "read"), ("b", "write")],
    ),
    (
        Post("kv 1", (Part(1, A),), (), "row", "all_gather"),
        "post kv 1 all_gather in row: a[0:4, 0:2] -> rank 1",
        [("a", "read")],
    ),
    (Wait("kv 1"), "wait kv 1", []),
    (Copy(A, B), "copy a[0:4, 0:2] -> b[0:4, 0:2]", [("a", "read"), ("b", "write")]),
    (Add(A, B), "add a[0:4, 0:2] -> b[0:4, 0:2]", [("a", "read"), ("b", "update")]),
    (Clear(A), "clear a[0:4, 0:2]", [("a", "write")]),
    (Finish(A, B, (0, 2)), "finish a[0:4, 0:2] -> b[0:4, 0:2]", [("a", "read"), ("b", "write")]),
    (Delta(A, B), "delta a[0:4, 0:2] . b[0:4, 0:2]", [("a", "read"), ("b", "update")]),
    (
        Copy(replace(A, without_lse=True), replace(B, without_lse=True)),
        "copy a[0:4, 0:2] without LSE -> b[0:4, 0:2] without LSE",
        [("a", "read"), ("b", "write")],
    ),
]


def test_examples_cover_every_step_type() -> None:
    assert {type(step) for step, _, _ in EXAMPLES} == set(STEPS.values())


@pytest.mark.parametrize(("step", "line", "accesses"), EXAMPLES, ids=lambda x: str(x) if isinstance(x, Step) else "")
def test_steps_have_readable_text(step: Step, line: str, accesses: list[tuple[str, str]]) -> None:
    assert str(step) == line
    assert [(accessed.buffer, access) for accessed, access in slices(step)] == accesses


def test_text_lists_buffers_and_steps() -> None:
    layout = Layout.contiguous(6, 2)
    problem = Problem(layout.ranges, layout.ranges, Mask.causal(), 2, 1)
    assert build("ring", problem, 1, "forward").text() == (
        "ring, forward of rank 1 of 2\n"
        "  input q: q, 3 rows, 2 heads, input\n"
        "  input kv: kv, 3 rows, 1 heads, input\n"
        "  output out: out, 3 rows, 2 heads, input\n"
        "  scratch out.sum: out, 3 rows, 2 heads, partial, becomes out\n"
        "  scratch kv+1.1: kv, 3 rows, 1 heads, input\n"
        "    0  post kv+1 1: kv+1.1[0:3, 0:1] <- rank 0\n"
        "    1  attend q[0:3, 0:2] x kv[0:3, 0:1] -> out.sum[0:3, 0:2]\n"
        "    2  wait kv+1 1\n"
        "    3  attend carry q[0:3, 0:2] x kv+1.1[0:3, 0:1] -> out.sum[0:3, 0:2]\n"
        "    4  finish out.sum[0:3, 0:2] -> out[0:3, 0:2]\n"
        "  saves q, kv, out"
    )


def test_text_of_an_unnamed_program_begins_with_its_direction() -> None:
    assert Program("", "backward", 1, 3, (), (), ()).text() == "backward of rank 1 of 3"


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_round_trip_through_json(schedule: str, world: int) -> None:
    layout = default_layout(schedule)(13, world)
    for mask, direction in product(MASKS.values(), DIRECTIONS):
        problem = Problem(layout.ranges, layout.ranges, mask, 4, 2)
        for rank in range(world):
            program = build(schedule, problem, rank, direction)
            back = Program.from_json(program.to_json())
            assert back == program
            assert hash(back) == hash(program)
            assert back.text() == program.text()
            assert program.text().count("\n") == len(program.buffers) + len(program.steps) + bool(program.saves)


@pytest.mark.parametrize(("step", "line"), [(step, line) for step, line, _ in EXAMPLES], ids=str)
def test_steps_round_trip_through_json(step: Step, line: str) -> None:
    program = Program("one", "forward", 0, 1, (), (step,), (("mesh", (0,)),), ("q",))
    assert Program.from_json(program.to_json()).steps == (step,)


@pytest.mark.parametrize("text", ["[]", "{", '{"Wait": {"post": "kv"}}', "3", '"Program"'])
def test_from_json_refuses_json_that_is_not_a_program(text: str) -> None:
    with pytest.raises(ValueError, match=r"Program\.from_json\(text\): expected the JSON|Expecting"):
        Program.from_json(text)


def test_from_json_refuses_unknown_types() -> None:
    text = Program("one", "forward", 0, 1, (), (Wait("kv"),), ()).to_json().replace('"Wait"', '"Sleep"')
    with pytest.raises(ValueError, match=r"Program\.from_json\(text\): unknown type 'Sleep'"):
        Program.from_json(text)


def test_json_has_only_plain_values() -> None:
    step = Attend(A, B, C, AT, AT, (0, 2))
    coded = json.loads(Program("one", "forward", 0, 1, (), (step,), ()).to_json())
    assert coded["Program"]["steps"][0]["Attend"]["q_positions"] == [{"range": [0, 8, 2]}]


SIZES = Sizes(batch=3, dim=8, value_dim=16, input_bytes=2, partial_bytes=4, reduce_bytes=1)


def test_width_of_a_field_is_its_elements_per_row() -> None:
    assert [SIZES.width(field) for field in KINDS["kv"]] == [8, 16]
    assert SIZES.width(Field("lse", "", always_partial=True)) == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "each"),
    [
        ("q", "input", 8 * 2),
        ("kv", "input", 24 * 2),
        ("kv", "partial", 24 * 4),
        ("dkv", "reduce", 24),
        ("out", "input", 16 * 2 + 4),
        ("out", "partial", 16 * 4 + 4),
        ("out", "reduce", 16 + 4),
        ("dout", "input", 16 * 2 + 4),
        ("dq", "partial", 8 * 4),
    ],
)
def test_row_bytes_depend_on_kind_and_dtype(kind: str, dtype: Dtype, each: int) -> None:
    assert SIZES.row_bytes(kind, dtype) == 3 * each
    assert Buffer("x", kind, 5, 2, dtype).bytes(SIZES) == 5 * 2 * 3 * each
    program = Program("", "forward", 0, 1, (Buffer("x", kind, 5, 2, dtype),), (), ())
    assert program.slice_bytes(slice_of("x", (1, 4), (1, 2)), SIZES) == 3 * 3 * each


def test_cells_of_a_slice_are_rows_times_heads() -> None:
    assert slice_of("x", (1, 4), (0, 2)).cells == 6
    assert slice_of("x", (4, 4)).cells == 0


def small_program(*steps: Step) -> Program:
    """Return a program with one buffer of each role and the given steps."""
    buffers = (
        Buffer("kv", "kv", 4, 2, role="input"),
        Buffer("dout", "dout", 4, 2, role="input"),
        Buffer("dkv", "dkv", 4, 2, role="output"),
        Buffer("dkv.sum", "dkv", 4, 2, "partial", becomes="dkv"),
        Buffer("kv.recv", "kv", 6, 2),
        Buffer("dout.recv", "dout", 4, 2),
        Buffer("kept", "q", 4, 2, role="saved"),
    )
    return Program("", "backward", 0, 2, buffers, steps, (("mesh", (0, 1)),))


def test_scratch_shares_the_memory_of_its_output_where_the_bytes_agree() -> None:
    program = small_program()
    assert not program.shares(program.buffer["dkv.sum"], SIZES)
    assert program.shares(program.buffer["dkv.sum"], replace(SIZES, input_bytes=4))
    for name in ("kv.recv", "dkv", "kv"):
        assert not program.shares(program.buffer[name], SIZES)


def test_scratch_bytes_exclude_the_callers_memory() -> None:
    program = small_program()
    recv_bytes = 6 * 2 * SIZES.row_bytes("kv", "input")
    rows = 4 * 2 * SIZES.row_bytes("dout", "input")
    assert program.scratch_bytes(SIZES) == recv_bytes + rows + 4 * 2 * SIZES.row_bytes("dkv", "partial")
    same_bytes = replace(SIZES, input_bytes=4)
    assert program.scratch_bytes(same_bytes) == 2 * recv_bytes + 4 * 2 * same_bytes.row_bytes("dout", "input")
    assert program.saved_bytes(SIZES) == 4 * 2 * SIZES.row_bytes("q", "input")


def test_packed_messages_count_as_scratch_once_for_all_peers() -> None:
    some = slice_of("kv", (0, 3), (0, 1))
    post = Post("kv 1", (Part(0, some), Part(1, some)), ())
    assert small_program(post).staged(post, SIZES) == [some]
    assert small_program(post).scratch_bytes(SIZES) == small_program().scratch_bytes(SIZES) + 3 * SIZES.row_bytes(
        "kv", "input"
    )


@pytest.mark.parametrize(
    ("buffer", "heads", "batch", "packed"),
    [
        ("kv", (0, 2), 1, False),
        ("kv", (0, 2), 2, True),  # rows of a batch are not contiguous
        ("kv", (0, 1), 1, True),  # neither are some heads of a row
        ("kv.recv", (0, 2), 2, False),
        ("kv.recv", (1, 2), 1, True),
        ("dout", (0, 2), 1, True),  # the LSE is stored head by head
        ("dout.recv", (0, 2), 2, False),
        ("dkv.sum", (0, 2), 2, False),
    ],
)
def test_slices_that_are_not_contiguous_rows_are_packed(
    buffer: str, heads: tuple[int, int], batch: int, packed: bool
) -> None:
    sent = slice_of(buffer, (0, 4), heads)
    post = Post("one", (Part(1, sent),), (Part(1, slice_of("kv.recv")),))
    assert small_program(post).staged(post, replace(SIZES, batch=batch)) == ([sent] if packed else [])


def test_scratch_that_shares_the_callers_memory_is_packed() -> None:
    post = Post("one", (Part(1, slice_of("dkv.sum")),), ())
    assert small_program(post).staged(post, replace(SIZES, input_bytes=4)) == [slice_of("dkv.sum")]
    assert small_program(post).staged(post, replace(SIZES, input_bytes=4, batch=1)) == []


def test_buffers_and_groups_are_found_by_name() -> None:
    program = small_program()
    assert program.buffer["kv.recv"].rows == 6
    assert program.group == {"mesh": (0, 1)}
