"""`deploy/train.sh` with fakes of the schedulers: the jobs it submits for each preset, site and option."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from deploy.test_deploy import DEPLOY, FakePath
from meshflash.train.config import PRESETS

SITES = {
    "slurm": ("sbatch", "slurm/nvidia.sh", 4),
    "frontier": ("sbatch", "slurm/frontier.sh", 8),
    "pbs": ("qsub", "pbs/nvidia.sh", 4),
    "aurora": ("qsub", "pbs/aurora.sh", 12),
    "lsf": ("bsub", "lsf/summit-like.sh", 6),
}
#: Names of the presets in the script, in the order in which it lists them.
NAMES = {
    f"{kind}-{name}" if not name.startswith("llama") else name: (kind, name)
    for kind, presets in PRESETS.items()
    for name in presets
}
OPTIONS = ["site", "nodes", "gpus", "time", "account", "queue", "chain", "dry-run"]
SPECIAL_CHARACTERS = ["--data", "my data, and yours", "--set", 'model="it\'s $HOME *"']


class Site(FakePath):
    """A `FakePath` with schedulers that answer as they do after a submission; the fixture `site` makes it."""

    def scheduler(self, name: str, answer: str = "", status: int = 0) -> None:
        """Add a scheduler that prints `answer`, with the number of its call, from 1, in place of %s."""
        self.fake(name, status=status)
        script = self.bin / name
        count = f"mapfile -d $'\\2' -t calls <\"{self.written}\"\nprintf '{answer}\\n' ${{#calls[@]}}\nexit"
        script.write_text(script.read_text().replace(f"exit {status}", f"{count} {status}"))

    def submit(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run train.sh."""
        return self.run("train.sh", *arguments, **variables)

    def dry_run(self, *arguments: str, **variables: str) -> list[list[str]]:
        """Return the arguments of each command that --dry-run prints; no fake is called."""
        done = self.submit(*arguments, "--dry-run", **variables)
        assert done.returncode == 0, done.stderr
        assert not self.written.exists()
        return [shlex.split(line) for line in done.stdout.splitlines()]

    def refused(self, *arguments: str, **variables: str) -> str:
        """Return the error message of invalid arguments; no fake is called."""
        done = self.submit(*arguments, **variables)
        assert (done.returncode, done.stdout) == (2, "")
        assert not self.written.exists()
        assert done.stderr.startswith("train.sh: ")
        return done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return a PATH without schedulers; a test adds them."""
    return Site(tmp_path)


def ranks(arguments: list[str], site: str) -> tuple[int, int]:
    """Return (nodes, ranks per node) that a submission requests."""
    options = dict(argument.split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument)
    if "sbatch" in arguments:
        return int(options["--nodes"]), int(options.get("--ntasks-per-node", SITES[site][2]))
    each = next(int(argument.split("=")[1]) for argument in arguments if argument.startswith("MESHFLASH_PER_NODE="))
    if "qsub" in arguments:
        select = next(argument for argument in arguments if argument.startswith("select="))
        return int(select.removeprefix("select=").split(":")[0]), each
    return int(arguments[arguments.index("-nnodes") + 1]), each


def training_command(arguments: list[str]) -> list[str]:
    """Return the command that the job runs, from the arguments of its submission."""
    for argument in arguments:
        if argument.startswith("MESHFLASH_COMMAND="):
            return shlex.split(argument.removeprefix("MESHFLASH_COMMAND="))
    return arguments[arguments.index("meshflash") :]


def test_train_script_is_executable_and_names_the_lines_to_edit() -> None:
    text = (DEPLOY / "train.sh").read_text()
    assert os.access(DEPLOY / "train.sh", os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "# Edit" in text.split("\nset -euo pipefail\n")[0]


def test_help_lists_every_option_and_shows_no_code(site: Site) -> None:
    done = site.submit("-h")
    assert done.returncode == 0
    assert all(f"  --{name} " in done.stdout for name in OPTIONS)
    assert "set -euo" not in done.stdout
    assert not any(line.startswith("#") for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "frontier") for name in NAMES), *(("llama3-8b-1m", where) for where in SITES if where != "frontier")],
)
def test_every_preset_gets_the_fewest_nodes_for_its_mesh(site: Site, name: str, where: str) -> None:
    kind, preset = NAMES[name]
    [arguments] = site.dry_run(name, "--site", where)
    assert training_command(arguments) == ["meshflash", "train", kind, "--preset", preset]
    nodes, each = ranks(arguments, where)
    mesh = PRESETS[kind][preset]().mesh
    need = mesh.fsdp * mesh.cp * mesh.tp
    assert (mesh.dp, nodes * each % need) == (-1, 0)
    assert each <= SITES[where][2]
    assert not any(
        n * e % need == 0 for n in range(1, nodes) for e in range(1, SITES[where][2] + 1)
    )  # no smaller number of nodes fits the mesh
    assert str(DEPLOY / SITES[where][1]) in arguments


def test_unknown_preset_error_lists_the_presets(site: Site) -> None:
    assert f"expected one of {', '.join(NAMES)}\n" in site.refused("llama4")
    assert f"one of {', '.join(NAMES)};" in site.refused()
    assert "the preset comes before" in site.refused("--data", "data", "llama3-8b")


def test_frontier_submission_of_one_million_tokens_uses_eight_nodes(site: Site) -> None:
    site.scheduler("sbatch", "Submitted batch job %s")
    arguments = ["--site", "frontier", "--account", "ABC123", "--data", "data", "--output", "runs/1m"]
    done = site.submit("llama3-8b-1m", *arguments)
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 1\n")
    [(called, _)] = site.calls()
    assert called == [
        *("sbatch", "--nodes=8", "--time=02:00:00", "--account=ABC123", f"{DEPLOY}/slurm/frontier.sh"),
        *("meshflash", "train", "gpt", "--preset", "llama3-8b-1m"),
        *("--data", "data", "--output", "runs/1m"),
    ]


def test_training_arguments_reach_the_job_unchanged(site: Site) -> None:
    for name, answer in (
        ("sbatch", "Submitted batch job %s"),
        ("qsub", "%s.server"),
        ("bsub", "Job <%s> is submitted"),
    ):
        site.scheduler(name, answer)
    for where in ("slurm", "aurora", "pbs", "lsf"):
        done = site.submit("gpt-tiny", "--site", where, *SPECIAL_CHARACTERS, "--", "--nodes", MESHFLASH_VENV="/my venv")
        assert done.returncode == 0, done.stderr
    for arguments, seen in site.calls():
        command = (
            arguments[arguments.index("meshflash") :]
            if arguments[0] != "qsub"
            else shlex.split(seen["MESHFLASH_COMMAND"])
        )
        assert command == ["meshflash", "train", "gpt", "--preset", "tiny", *SPECIAL_CHARACTERS, "--nodes"]
        assert seen["MESHFLASH_VENV"] == "/my venv"
        if arguments[0] == "qsub":  # qsub exports only the variables that -v names
            named = arguments[arguments.index("-v") + 1].split(",")
            assert set(named) == {"MESHFLASH_COMMAND", "MESHFLASH_PER_NODE", "MESHFLASH_VENV"}


def test_options_become_the_options_of_each_scheduler(site: Site) -> None:
    options = ["--nodes=4", "--time", "1:30:00", "--account", "mine", "--queue", "fast", "--gpus", "8"]
    submitted = {where: site.dry_run("vit-2.6b", "--site", where, *options)[0] for where in SITES}
    script = {where: str(DEPLOY / path) for where, (_, path, _) in SITES.items()}
    for where, more in (("slurm", ["--ntasks-per-node=8", "--gpus-per-node=8"]), ("frontier", [])):
        assert submitted[where][: submitted[where].index("meshflash")] == [
            *("sbatch", "--nodes=4", "--time=1:30:00", *more, "--account=mine", "--partition=fast", script[where]),
        ]
    for where, select in (("pbs", "select=4:ncpus=64:ngpus=8:mpiprocs=8"), ("aurora", "select=4")):
        assert submitted[where][submitted[where].index("-l") :] == [
            *("-l", select, "-l", "walltime=1:30:00", "-A", "mine", "-q", "fast", script[where]),
        ]
    assert submitted["lsf"][: submitted["lsf"].index("meshflash")] == [
        *("env", "MESHFLASH_PER_NODE=8", "bsub", "-nnodes", "4", "-W", "1:30", "-P", "mine", "-q", "fast"),
        script["lsf"],
    ]


def test_mesh_arguments_change_the_number_of_nodes_and_ranks(site: Site) -> None:
    for arguments, nodes, each in [
        (["--cp", "16"], 2, 8),
        (["--cp=16", "--tp", "2"], 4, 8),
        (["--set", "mesh.cp=4", "--dp", "2"], 1, 8),
        (["--cp", "4", "--dp", "3"], 2, 6),  # exactly dp * cp ranks
        (["--cp", "3", "--dp", "-1"], 1, 6),
        (["--nodes", "5"], 5, 8),
    ]:
        [command] = site.dry_run("llama3.2-1b", "--site", "frontier", *arguments)
        assert ranks(command, "frontier") == (nodes, each), arguments
    assert "take --nodes 8\n" in site.refused("llama3-8b-1m", "--site", "frontier", "--nodes", "5")


def test_idle_gpus_are_reported(site: Site) -> None:
    done = site.submit("llama3-8b-1m", "--site", "aurora", "--dry-run")
    assert (
        done.stderr
        == "train.sh: 8 x 8 ranks\ntrain.sh: 4 of a node's 12 GPUs stay idle: 64 ranks do not fit them evenly\n"
    )


@pytest.mark.parametrize(
    ("installed", "variables", "script"),
    [
        (("sbatch", "qsub", "bsub"), {}, "slurm/nvidia.sh"),
        (("qsub", "bsub"), {}, "pbs/nvidia.sh"),
        (("bsub",), {}, "lsf/summit-like.sh"),
        (("sbatch",), {"LMOD_SYSTEM_NAME": "frontier"}, "slurm/frontier.sh"),
    ],
)
def test_first_installed_scheduler_is_used(
    site: Site, installed: tuple[str, ...], variables: dict[str, str], script: str
) -> None:
    for name in installed:
        site.scheduler(name)
    assert str(DEPLOY / script) in site.dry_run("gpt-tiny", **variables)[0]


def test_missing_scheduler_error_names_the_command_to_run(site: Site) -> None:
    message = site.refused("llama3-8b-1m", "--data", "data")
    assert "found none of sbatch, qsub, bsub" in message
    assert message.endswith("mpirun -np 64 meshflash train gpt --preset llama3-8b-1m --data data\n")
    assert "found no qsub" in site.refused("gpt-tiny", "--site", "aurora")


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({"SLURM_JOB_ID": "7"}, ["env", "SLURM_NTASKS_PER_NODE=4", "slurm/nvidia.sh"]),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, ["env", "slurm/nvidia.sh"]),
        ({"PBS_JOBID": "7"}, ["env", "MESHFLASH_PER_NODE=4", "pbs/nvidia.sh"]),
        ({"LSB_JOBID": "7"}, ["env", "MESHFLASH_PER_NODE=4", "lsf/summit-like.sh"]),
    ],
)
def test_inside_a_job_the_training_starts_at_once(site: Site, variables: dict[str, str], command: list[str]) -> None:
    [arguments] = site.dry_run("vit-2.6b", "--data", "d", **variables)
    assert arguments == [
        *(*command[:-1], str(DEPLOY / command[-1])),
        *("meshflash", "train", "vit", "--preset", "2.6b", "--data", "d"),
    ]
    assert "inside a job" in site.refused("gpt-tiny", "--output", "o", "--chain", "2", **variables)


def test_inside_a_job_the_job_script_runs(site: Site) -> None:
    site.scheduler("srun", status=3)
    assert site.submit("gpt-tiny", SLURM_JOB_ID="7").returncode == 3
    [(arguments, seen)] = site.calls()
    assert arguments[-5:] == ["meshflash", "train", "gpt", "--preset", "tiny"]
    assert (arguments[0], seen["SLURM_NTASKS_PER_NODE"]) == ("srun", "4")


@pytest.mark.parametrize(
    ("submit", "answer", "dependency"),
    [
        ("sbatch", "Submitted batch job 4%s", "--dependency=afterany:4{}"),
        ("qsub", "4%s.pbs-01", "depend=afterany:4{}.pbs-01"),
        ("bsub", "Job <4%s> is submitted to queue <batch>.", "ended(4{})"),
    ],
)
def test_each_job_of_a_chain_waits_for_the_previous_one(site: Site, submit: str, answer: str, dependency: str) -> None:
    site.scheduler(submit, answer)
    done = site.submit("gpt-tiny", "--output", "o", "--chain", "3")
    assert (done.returncode, done.stdout.splitlines()) == (0, [answer.replace("%s", str(n)) for n in (1, 2, 3)])
    calls = [arguments for arguments, _ in site.calls()]
    assert [
        [argument for argument in arguments if "afterany" in argument or "ended" in argument] for arguments in calls
    ] == [
        *([], [dependency.format(1)], [dependency.format(2)]),
    ]
    site.written.unlink()
    lines = site.dry_run("gpt-tiny", "--output", "o", "--chain", "3")
    assert [any("JOB_1" in argument for argument in arguments) for arguments in lines] == [False, True, False]


def test_chain_ends_at_the_first_job_that_the_scheduler_refuses(site: Site) -> None:
    site.scheduler("sbatch", status=5)
    assert site.submit("gpt-tiny", "--output", "o", "--chain", "3").returncode == 5
    assert len(site.calls()) == 1
    site.scheduler("sbatch", "no number")
    done = site.submit("gpt-tiny", "--output", "o", "--chain", "3")
    assert (done.returncode, len(site.calls())) == (2, 2)
    assert "those after it are not submitted" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chain", "2"], "--chain 2: give --output"),
        (["--chain", "2", "--output", "o", "--fresh"], "leave out --fresh"),
        (["--chain", "0"], "--chain 0: expected a number"),
        (["--nodes", "two"], "--nodes two: expected a number"),
        (["--cp", "x"], "--cp x: expected a number"),
        (["--time", "2h"], "--time 2h: expected hours"),
        (["--site", "moon"], "--site moon: expected one of slurm, frontier, pbs, aurora, lsf"),
        (["--account"], "--account: expected a value"),
    ],
)
def test_invalid_options_are_refused_before_any_submission(site: Site, arguments: list[str], message: str) -> None:
    site.scheduler("sbatch")
    assert message in site.refused("gpt-tiny", *arguments)
