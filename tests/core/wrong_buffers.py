"""Programs that are wrong as a whole, in their buffers, or in the slices that their steps access.

Each row is a `Wrong`. Wrong computation and communication is in `wrong_steps.py`.
"""

from __future__ import annotations

from core.edits import (
    EXTRA_OUT,
    GATHER_B,
    HEADS_B,
    HEADS_F,
    OWN,
    RING_B,
    RING_F,
    WITHOUT_LSE_B,
    WITHOUT_LSE_F,
    Wrong,
    both,
    buffer,
    change,
    extra_buffers,
    insert,
    k,
    program,
    put,
    s,
    without_lse,
)
from meshflash.core.program import Add, Attend, Buffer, Clear, Copy, Delta, Part, Post

#: An attention over all rows and half of the heads, as on rank 0 of ulysses.
ALL_ROWS = (range(6),)
HALF = Attend(s("q:0", (0, 6), (0, 2)), k("kv:0", (0, 6), (0, 1)), s("y", (0, 6), (0, 2)), ALL_ROWS, ALL_ROWS, (0, 2))
WRONG: list[Wrong] = [
    Wrong(*row)
    for row in (
        # the program as a whole
        ("another world size", RING_F, program(world=3), "is written for 3 ranks, the problem has 2"),
        (
            "a group without its own rank",
            RING_F,
            program(groups=(("mesh", (1,)),)),
            "group mesh must list its ranks once, in order",
        ),
        (
            "a rank twice in a group",
            RING_F,
            program(groups=(("mesh", (0, 0, 1)),)),
            "group mesh must list its ranks once, in order",
        ),
        ("a group twice", RING_F, program(groups=(("mesh", (0, 1)),) * 2), "two groups have the same name"),
        (
            "another order in the group",
            RING_F,
            program(groups=(("mesh", (1, 0)),)),
            "group mesh must list its ranks once, in order, and this rank among them",
        ),
        (
            "a group with a rank outside of the mesh",
            RING_F,
            program(groups=(("mesh", (0, 1)), ("x", (0, 7)))),
            "group x: rank 7 does not list",
        ),
        ("a buffer twice", RING_F, extra_buffers(Buffer("kv+1.1", "kv", 3, 2)), "two buffers have the same name"),
        ("an unknown kind", RING_F, extra_buffers(Buffer("x", "x", 3, 2)), "x has an unknown kind or an invalid shape"),
        ("no heads", RING_F, extra_buffers(Buffer("x", "kv", 3, 0)), "x has an unknown kind or an invalid shape"),
        (
            "one output too many",
            RING_F,
            extra_buffers(Buffer("o", "out", 3, 4, role="output")),
            "the caller's buffers are",
        ),
        ("an input that is scratch", RING_F, buffer("q", role="scratch"), "the caller's buffers are"),
        (
            "an input of another dtype",
            RING_F,
            buffer("q", dtype="partial"),
            "not have the shape and dtype of the problem",
        ),
        ("an input of other rows", RING_F, buffer("kv", rows=4), "not have the shape and dtype of the problem"),
        ("an input of other heads", RING_F, buffer("q", heads=2), "not have the shape and dtype of the problem"),
        ("nothing saved", RING_F, program(saves=()), r"saves \(\), expected \['out'\]"),
        ("scratch saved", RING_F, program(saves=("q", "kv", "out", "out.sum")), "saves .*, expected"),
        ("a backward that saves", RING_B, program(saves=("q",)), r"saves \('q',\), expected \[\]"),
        (
            "saved and never written",
            HEADS_F,
            both(
                extra_buffers(Buffer("x", "q", 3, 4, role="saved")), program(saves=("out", "q:0", "kv:0", "out:0", "x"))
            ),
            "x is saved before all of it is written",
        ),
        (
            "half a result saved",
            HEADS_F,
            both(
                extra_buffers(Buffer("x", "out", 6, 2, role="saved"), Buffer("y", "out", 6, 2, "partial")),
                program(saves=("out", "q:0", "kv:0", "out:0", "x")),
                insert(5, HALF),
                insert(6, Copy(s("y", (0, 6), (0, 2)), s("x", (0, 6), (0, 2)))),
            ),
            "x is saved, but is not the finished result of its rows",
        ),
        (
            "gradients saved",
            HEADS_F,
            both(
                extra_buffers(Buffer("x", "dq", 3, 4, role="saved")),
                program(saves=("out", "q:0", "kv:0", "out:0", "x")),
            ),
            "x cannot be saved",
        ),
        (
            "more rows than were saved",
            HEADS_B,
            buffer("q:0", rows=7),
            "reads q:0, which no forward saved with this number of rows",
        ),
        (
            "another kind than was saved",
            HEADS_B,
            buffer("q:0", kind="out"),
            "reads q:0 as out, which the forward saved as q",
        ),
        (
            "saved, then written",
            HEADS_B,
            insert(0, Clear(s("q:0", (0, 6), (0, 2)))),
            "was saved and may not be written",
        ),
        (
            "a result over some keys used as the result over all",
            RING_B,
            both(
                extra_buffers(Buffer("x", "out", 3, 4)),
                insert(0, Attend(s("q"), k("kv"), s("x"), OWN, OWN, (0, 4), final=True)),
                change(2, out=s("x")),
            ),
            "out is not the finished result of its rows",
        ),
        (
            "q, which was not saved",
            HEADS_B,
            extra_buffers(Buffer("q", "q", 3, 4, role="input")),
            "the caller's buffers are",
        ),
        # results without their LSE, gradients without their delta
        (
            "a requested LSE that does not arrive",
            HEADS_F,
            put(7, Copy(without_lse("out:0", (0, 3), (0, 2)), without_lse("out", (0, 3), (0, 2)))),
            "output out lacks the LSE of some rows, which the problem requests",
        ),
        ("a delta that no step computes", WITHOUT_LSE_B, put(3), "read with its LSE or delta, which were not computed"),
        (
            "a result that is saved without its LSE",
            WITHOUT_LSE_F,
            both(
                extra_buffers(Buffer("x", "out", 6, 2, role="saved")),
                program(saves=("out", "q:0", "kv:0", "out:0", "x")),
                insert(5, Copy(without_lse("out:0", (0, 6), (0, 2)), without_lse("x", (0, 6), (0, 2)))),
            ),
            "x is saved, but is not the finished result of its rows with their LSE",
        ),
        (
            "an attention without LSE",
            WITHOUT_LSE_F,
            change(4, out=without_lse("out:0", (0, 6), (0, 2))),
            "only copies and posts of out and dout may",
        ),
        (
            "queries without LSE",
            WITHOUT_LSE_F,
            put(0, Copy(without_lse("q", (0, 3), (0, 2)), without_lse("q:0", (0, 3), (0, 2)))),
            "only copies and posts of out and dout may",
        ),
        (
            "an LSE without a source",
            WITHOUT_LSE_F,
            change(8, dst=s("out", (0, 3), (2, 4))),
            "source and target differ in kind or shape",
        ),
        (
            "sent without LSE and received with it",
            WITHOUT_LSE_F,
            change(5, sends=(Part(1, s("out:0", (3, 6), (0, 2))),)),
            "shape, kind or dtype differ",
        ),
        (
            "a delta of keys",
            WITHOUT_LSE_B,
            change(3, out=s("q:0", (0, 6), (0, 2))),
            r"expected out in the input's dtype, got q:0 \(q, input\)",
        ),
        (
            "a delta of other rows",
            WITHOUT_LSE_B,
            change(3, out=s("out:0", (0, 3), (0, 2)), dout=s("dout2.0", (3, 6), (0, 2))),
            "out is not the finished result of the rows of dout",
        ),
        (
            "a delta that forgets the gradient of the LSE",
            HEADS_B,
            insert(3, Delta(s("out:0", (0, 6), (0, 2)), s("dout2.0", (0, 6), (0, 2)))),
            "delta cannot be recomputed: the LSE may have a gradient, which only the caller's delta holds",
        ),
        ("saved twice", RING_F, program(saves=("q", "kv", "out", "out")), "saves a buffer twice"),
        # scratch that becomes an output
        ("becoming an unknown output", RING_F, buffer("out.sum", becomes="x"), "out.sum cannot become x"),
        ("becoming an input", RING_F, buffer("kv+1.1", becomes="kv"), "cannot become kv"),
        (
            "becoming another kind",
            RING_B,
            both(buffer("dq.sum", becomes=""), buffer("kv+1.1", becomes="dq")),
            "cannot become dq",
        ),
        (
            "becoming from reductions",
            RING_B,
            both(buffer("dkv.sum", becomes=""), buffer("dkv.0", becomes="dkv")),
            "cannot",
        ),
        ("becoming another shape", RING_F, buffer("out.sum", rows=4), "out.sum becomes out but has another shape"),
        (
            "two buffers that become one output",
            RING_B,
            extra_buffers(Buffer("dq.more", "dq", 3, 4, "partial", becomes="dq")),
            "two buffers become dq",
        ),
        ("written after it became", RING_F, insert(5, Clear(s("out.sum"))), "is written after it became out"),
        (
            "added to after it became",
            RING_B,
            insert(10, Add(k("dkv.0"), k("dkv.sum"))),
            "is written after it became dkv",
        ),
        (
            "added to after a part of it became",
            RING_B,
            put(
                9,
                Copy(k("dkv.sum", (0, 1)), k("dkv", (0, 1))),
                Add(k("dkv.0"), k("dkv.sum")),
                Copy(k("dkv.sum"), k("dkv")),
            ),
            "is written after it became dkv",
        ),
        (
            "read after it was finished",
            RING_F,
            both(extra_buffers(EXTRA_OUT), insert(5, Copy(s("out.sum"), s("more")))),
            "after it was",
        ),
        (
            "an output written from elsewhere",
            RING_B,
            both(
                extra_buffers(Buffer("dq.more", "dq", 3, 4)),
                insert(8, Clear(s("dq.more")), Copy(s("dq.more"), s("dq"))),
            ),
            "may be the memory of dq.sum",
        ),
        (
            "an output written from another place",
            RING_B,
            insert(8, Copy(s("dq.sum", (0, 1)), s("dq", (1, 2)))),
            "may be the memory of dq.sum",
        ),
        ("an output cleared", RING_B, insert(0, Clear(k("dkv"))), "may be the memory of dkv.sum"),
        (
            "finished while it is sent",
            RING_F,
            insert(4, Post("x", (Part(1, s("out.sum")),), ())),
            r"is touched while post x still sends out\.sum",
        ),
        (
            "copied while it is sent",
            RING_B,
            insert(9, Post("x", (Part(1, k("dkv.sum")),), ())),
            "while post x still sends",
        ),
        # steps and the slices that they access
        ("an object that is not a step", RING_F, insert(0, s("q")), "unknown step"),  # type: ignore[arg-type]
        ("no such buffer", RING_F, insert(1, Clear(s("x"))), "there is no buffer x"),
        (
            "too many rows",
            RING_F,
            insert(1, Clear(s("out.sum", (0, 4)))),
            "lies outside its buffer of 3 rows and 4 heads",
        ),
        ("too many heads", RING_F, insert(1, Clear(s("out.sum", (0, 3), (0, 5)))), "lies outside its buffer"),
        ("rows before the first", RING_F, insert(1, Clear(s("out.sum", (-1, 3)))), "lies outside its buffer"),
        ("rows backwards", RING_F, insert(1, Clear(s("out.sum", (2, 1)))), "lies outside its buffer"),
        ("an input written", RING_F, insert(0, Clear(s("q"))), "is the caller's and may not be written"),
        (
            "an input received into",
            RING_F,
            change(0, recvs=(Part(1, k("kv")),)),
            "is the caller's and may not be written",
        ),
        ("a sum in an output", GATHER_B, change(2, add_dq=True), "is an output and cannot be added to"),
        (
            "read before it is written",
            RING_F,
            insert(0, Copy(k("kv+1.1", (0, 1)), k("kv+1.1", (1, 2)))),
            "read before it is",
        ),
        (
            "sent before it is written",
            RING_B,
            insert(0, Post("x", (Part(1, k("dkv.1")),), ())),
            "is read before it is written",
        ),
        ("carried before it is written", RING_F, change(1, carry=True), "is read before it is written"),
        ("attended while it arrives", RING_F, put(2), "is touched while post kv.1 1 still receives"),
        (
            "written while it is sent",
            RING_B,
            insert(6, Clear(k("dkv.1", (2, 3)))),
            "is touched while post dkv 1 still sends",
        ),
        ("read while it arrives", RING_B, insert(6, Copy(k("dkv.0", (0, 1)), k("dkv.part", (0, 1)))), "still receives"),
        (
            "two receives into one slice",
            RING_B,
            insert(6, Post("x", (), (Part(1, k("dkv.0", (1, 3))),))),
            "is touched while post dkv 1 still receives",
        ),
        (
            "received into twice by one post",
            RING_B,
            change(5, recvs=(Part(1, k("dkv.0")), Part(1, k("dkv.0")))),
            "is written and also used by the same step",
        ),
        ("sent and received into", RING_B, change(5, recvs=(Part(1, k("dkv.1")),)), "is written and also used"),
        (
            "copied onto itself",
            RING_B,
            insert(5, Copy(k("dkv.1", (0, 2)), k("dkv.1", (1, 3)))),
            "is written and also used",
        ),
        (
            "received into some heads",
            RING_F,
            change(0, recvs=(Part(1, k("kv+1.1", (0, 3), (0, 1))),)),
            "into some heads of kv",
        ),
        (
            "received into an output",
            RING_B,
            insert(6, Post("x", (), (Part(1, k("dkv")),))),
            "receive into a scratch buffer instead",
        ),
        (
            "received into what becomes an output",
            RING_B,
            insert(6, Post("x", (), (Part(1, k("dkv.sum")),))),
            "receive into a scratch buffer instead",
        ),
    )
]
