"""The examples of libraries print the same losses on one rank and on several, within two minutes and 60 lines.

Also evaluation by a Trainer, which runs as a script of its own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshflash.runtime.listen import LOOPBACK

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
#: Example -> arguments with more ranks; the number of ranks is in front of a torchrun.
RUNS = {
    "transformers_fsdp": [(1, ""), (2, "")],
    "transformers_trainer": [(1, ""), (2, ""), (4, "--dp 2")],
    "transformers_accelerate": [(1, ""), (2, "")],
    "trl_sft": [(1, ""), (2, "")],
    "trl_dpo": [(1, ""), (2, "")],
    "peft_lora": [(1, ""), (2, "")],
    "torchtitan_llama": [(1, ""), (2, ""), (3, "")],
    "lightning_context_parallel": [(0, "--cp 1"), (0, "--cp 2"), (0, "--cp 2 --dp 2")],
}
#: What a trainer's log says of a step beside its loss, and must be the same.
SAME = ("grad_norm", "num_input_tokens_seen", "num_tokens", "entropy", "logps/chosen", "rewards/margins")


def _output(path, ranks, arguments):
    """Return what a script printed on several ranks; with 0 ranks it starts them itself."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, *torchrun, str(path), *arguments.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK, "MESHFLASH_TIMEOUT": "60"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _run(name, ranks, arguments):
    """Return what each step of an example printed: numbers by name."""
    stdout = _output(EXAMPLES / f"{name}.py", ranks, arguments)
    steps = [dict(loss=float(found)) for found in re.findall(r"^step \d+: loss ([0-9.]+)", stdout, re.MULTILINE)]
    for line in re.findall(r"^\{'loss'.*\}$", stdout, re.MULTILINE):
        logged = json.loads(line.replace("'", '"'))
        steps.append({key: float(logged[key]) for key in ("loss", *SAME) if key in logged})
    return steps


def _check(name):
    first, *others = [_run(name, ranks, arguments) for ranks, arguments in RUNS[name]]
    assert len(first) >= 4
    assert first[0]["loss"] != first[-1]["loss"]
    for other in others:
        assert len(other) == len(first)
        for mine, theirs in zip(other, first, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3)


def test_fsdp_example_runs():
    steps = _run("transformers_fsdp", 2, "")  # it compares its first step with one device
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1


@pytest.mark.integrations
@pytest.mark.parametrize("name", RUNS)
def test_examples_print_the_losses_of_one_device(name):
    _check(name)


@pytest.mark.integrations
@pytest.mark.parametrize("dp", [1, 2])
def test_trainer_evaluates_and_predicts_each_row_once(dp):
    def evaluated(cp):
        stdout = _output(Path(__file__).parent / "evaluate_trainer.py", cp * dp, f"--dp {dp}")
        return json.loads(next(line for line in stdout.splitlines() if line.startswith('{"eval_loss')))

    one, two = evaluated(1), evaluated(2)
    assert one["eval_rows"] == two["eval_rows"] == len(two["logits"]) == 11
    for key in ("eval_loss", "eval_right"):
        assert two[key] == pytest.approx(one[key], rel=1e-4), key
    for row, same in zip(two["logits"], one["logits"], strict=True):
        assert row == pytest.approx(same, rel=1e-4, abs=1e-5)
    assert two["gathered"] == [f"rank {2 * n}" for n in range(dp)]


@pytest.mark.integrations
def test_trainer_refuses_to_gather_logits_of_each_ranks_own_tokens():
    script = Path(__file__).parent / "evaluate_trainer.py"
    with pytest.raises(AssertionError, match="ranks that share a sequence hold different values"):
        _output(script, 2, "--outputs own")


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(lines) <= 60, path.name
