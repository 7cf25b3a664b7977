"""`deploy/train.sh` with stand-ins for the schedulers: what each is asked for, for which preset, in which order."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from deploy.test_deploy import DEPLOY, Desk
from meshflash.train.config import PRESETS

SITES = {
    "slurm": ("sbatch", "slurm/nvidia.sh", 4),
    "frontier": ("sbatch", "slurm/frontier.sh", 8),
    "pbs": ("qsub", "pbs/nvidia.sh", 4),
    "aurora": ("qsub", "pbs/aurora.sh", 12),
    "lsf": ("bsub", "lsf/summit-like.sh", 6),
}
#: What the script calls presets, in the order in which it lists them.
NAMES = {
    f"{kind}-{name}" if not name.startswith("llama") else name: (kind, name)
    for kind, presets in PRESETS.items()
    for name in presets
}
OPTIONS = ["site", "nodes", "gpus", "time", "account", "queue", "chain", "dry-run"]
ODD = ["--data", "my data, and yours", "--set", 'model="it\'s $HOME *"']


class Site(Desk):
    """A desk with schedulers, which say what they would say of a new job."""

    def scheduler(self, name: str, says: str = "", status: int = 0) -> None:
        """A stand-in that says this, with the number of its call, from 1, for %s."""
        self.fake(name, status=status)
        script = self.bin / name
        count = f"mapfile -d $'\\2' -t calls <\"{self.written}\"\nprintf '{says}\\n' ${{#calls[@]}}\nexit"
        script.write_text(script.read_text().replace(f"exit {status}", f"{count} {status}"))

    def submit(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("train.sh", *words, **variables)

    def printed(self, *words: str, **variables: str) -> list[list[str]]:
        """The commands that --dry-run prints, as a shell reads them; nothing is called."""
        done = self.submit(*words, "--dry-run", **variables)
        assert done.returncode == 0, done.stderr
        assert not self.written.exists()
        return [shlex.split(line) for line in done.stdout.splitlines()]

    def refused(self, *words: str, **variables: str) -> str:
        """What the script says of a mistake; nothing is called."""
        done = self.submit(*words, **variables)
        assert (done.returncode, done.stdout) == (2, "")
        assert not self.written.exists()
        assert done.stderr.startswith("train.sh: ")
        return done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def ranks(words: list[str], site: str) -> tuple[int, int]:
    """(nodes, ranks of each) that a command asks for."""
    options = dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if "sbatch" in words:
        return int(options["--nodes"]), int(options.get("--ntasks-per-node", SITES[site][2]))
    each = next(int(word.split("=")[1]) for word in words if word.startswith("MESHFLASH_PER_NODE="))
    if "qsub" in words:
        select = next(word for word in words if word.startswith("select="))
        return int(select.removeprefix("select=").split(":")[0]), each
    return int(words[words.index("-nnodes") + 1]), each


def trained(words: list[str]) -> list[str]:
    """The command of a job, out of the one that submits it."""
    for word in words:
        if word.startswith("MESHFLASH_COMMAND="):
            return shlex.split(word.removeprefix("MESHFLASH_COMMAND="))
    return words[words.index("meshflash") :]


def test_it_runs_by_its_name_and_says_what_to_edit() -> None:
    text = (DEPLOY / "train.sh").read_text()
    assert os.access(DEPLOY / "train.sh", os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "# Edit" in text.split("\nset -euo pipefail\n")[0]


def test_help_names_every_option_and_no_code(site: Site) -> None:
    done = site.submit("-h")
    assert done.returncode == 0
    assert all(f"  --{name} " in done.stdout for name in OPTIONS)
    assert "set -euo" not in done.stdout
    assert not any(line.startswith("#") for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "frontier") for name in NAMES), *(("llama3-8b-1m", where) for where in SITES if where != "frontier")],
)
def test_every_preset_of_meshflash_gets_the_nodes_of_its_mesh(site: Site, name: str, where: str) -> None:
    kind, preset = NAMES[name]
    [words] = site.printed(name, "--site", where)
    assert trained(words) == ["meshflash", "train", kind, "--preset", preset]
    nodes, each = ranks(words, where)
    mesh = PRESETS[kind][preset]().mesh
    need = mesh.fsdp * mesh.cp * mesh.tp
    assert (mesh.dp, nodes * each % need) == (-1, 0)
    assert each <= SITES[where][2]
    assert not any(n * e % need == 0 for n in range(1, nodes) for e in range(1, SITES[where][2] + 1))  # fewer would do
    assert str(DEPLOY / SITES[where][1]) in words


def test_an_unknown_preset_lists_those_there_are(site: Site) -> None:
    assert f"expected one of {', '.join(NAMES)}\n" in site.refused("llama4")
    assert f"one of {', '.join(NAMES)};" in site.refused()
    assert "the preset comes before" in site.refused("--data", "data", "llama3-8b")


def test_a_million_tokens_on_frontier(site: Site) -> None:
    site.scheduler("sbatch", "Submitted batch job %s")
    words = ["--site", "frontier", "--account", "ABC123", "--data", "data", "--output", "runs/1m"]
    done = site.submit("llama3-8b-1m", *words)
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 1\n")
    [(called, _)] = site.calls()
    assert called == [
        *("sbatch", "--nodes=8", "--time=02:00:00", "--account=ABC123", f"{DEPLOY}/slurm/frontier.sh"),
        *("meshflash", "train", "gpt", "--preset", "llama3-8b-1m"),
        *("--data", "data", "--output", "runs/1m"),
    ]


def test_arguments_arrive_as_they_were_given(site: Site) -> None:
    for name, says in (("sbatch", "Submitted batch job %s"), ("qsub", "%s.server"), ("bsub", "Job <%s> is submitted")):
        site.scheduler(name, says)
    for where in ("slurm", "aurora", "pbs", "lsf"):
        done = site.submit("gpt-tiny", "--site", where, *ODD, "--", "--nodes", MESHFLASH_VENV="/my venv")
        assert done.returncode == 0, done.stderr
    for words, seen in site.calls():
        command = words[words.index("meshflash") :] if words[0] != "qsub" else shlex.split(seen["MESHFLASH_COMMAND"])
        assert command == ["meshflash", "train", "gpt", "--preset", "tiny", *ODD, "--nodes"]
        assert seen["MESHFLASH_VENV"] == "/my venv"
        if words[0] == "qsub":  # which takes nothing along that is not named
            named = words[words.index("-v") + 1].split(",")
            assert set(named) == {"MESHFLASH_COMMAND", "MESHFLASH_PER_NODE", "MESHFLASH_VENV"}


def test_what_each_scheduler_is_told(site: Site) -> None:
    options = ["--nodes=4", "--time", "1:30:00", "--account", "mine", "--queue", "fast", "--gpus", "8"]
    told = {where: site.printed("vit-2.6b", "--site", where, *options)[0] for where in SITES}
    script = {where: str(DEPLOY / path) for where, (_, path, _) in SITES.items()}
    for where, more in (("slurm", ["--ntasks-per-node=8", "--gpus-per-node=8"]), ("frontier", [])):
        assert told[where][: told[where].index("meshflash")] == [
            *("sbatch", "--nodes=4", "--time=1:30:00", *more, "--account=mine", "--partition=fast", script[where]),
        ]
    for where, select in (("pbs", "select=4:ncpus=64:ngpus=8:mpiprocs=8"), ("aurora", "select=4")):
        assert told[where][told[where].index("-l") :] == [
            *("-l", select, "-l", "walltime=1:30:00", "-A", "mine", "-q", "fast", script[where]),
        ]
    assert told["lsf"][: told["lsf"].index("meshflash")] == [
        *("env", "MESHFLASH_PER_NODE=8", "bsub", "-nnodes", "4", "-W", "1:30", "-P", "mine", "-q", "fast"),
        script["lsf"],
    ]


def test_the_mesh_follows_the_arguments(site: Site) -> None:
    for words, nodes, each in [
        (["--cp", "16"], 2, 8),
        (["--cp=16", "--tp", "2"], 4, 8),
        (["--set", "mesh.cp=4", "--dp", "2"], 1, 8),
        (["--cp", "4", "--dp", "3"], 2, 6),  # not a rank more than dp says
        (["--cp", "3", "--dp", "-1"], 1, 6),
        (["--nodes", "5"], 5, 8),
    ]:
        [command] = site.printed("llama3.2-1b", "--site", "frontier", *words)
        assert ranks(command, "frontier") == (nodes, each), words
    assert "take --nodes 8\n" in site.refused("llama3-8b-1m", "--site", "frontier", "--nodes", "5")


def test_gpus_that_stay_idle_are_told(site: Site) -> None:
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
def test_the_scheduler_that_is_found_is_taken(
    site: Site, installed: tuple[str, ...], variables: dict[str, str], script: str
) -> None:
    for name in installed:
        site.scheduler(name)
    assert str(DEPLOY / script) in site.printed("gpt-tiny", **variables)[0]


def test_without_a_scheduler_it_says_what_to_do(site: Site) -> None:
    said = site.refused("llama3-8b-1m", "--data", "data")
    assert "found none of sbatch, qsub, bsub" in said
    assert said.endswith("mpirun -np 64 meshflash train gpt --preset llama3-8b-1m --data data\n")
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
def test_inside_a_job_it_runs_at_once(site: Site, variables: dict[str, str], command: list[str]) -> None:
    [words] = site.printed("vit-2.6b", "--data", "d", **variables)
    assert words == [
        *(*command[:-1], str(DEPLOY / command[-1])),
        *("meshflash", "train", "vit", "--preset", "2.6b", "--data", "d"),
    ]
    assert "inside a job" in site.refused("gpt-tiny", "--output", "o", "--chain", "2", **variables)


def test_inside_a_job_the_job_script_is_what_runs(site: Site) -> None:
    site.scheduler("srun", status=3)
    assert site.submit("gpt-tiny", SLURM_JOB_ID="7").returncode == 3
    [(words, seen)] = site.calls()
    assert words[-5:] == ["meshflash", "train", "gpt", "--preset", "tiny"]
    assert (words[0], seen["SLURM_NTASKS_PER_NODE"]) == ("srun", "4")


@pytest.mark.parametrize(
    ("submit", "says", "waits"),
    [
        ("sbatch", "Submitted batch job 4%s", "--dependency=afterany:4{}"),
        ("qsub", "4%s.pbs-01", "depend=afterany:4{}.pbs-01"),
        ("bsub", "Job <4%s> is submitted to queue <batch>.", "ended(4{})"),
    ],
)
def test_jobs_of_a_chain_wait_for_the_one_before(site: Site, submit: str, says: str, waits: str) -> None:
    site.scheduler(submit, says)
    done = site.submit("gpt-tiny", "--output", "o", "--chain", "3")
    assert (done.returncode, done.stdout.splitlines()) == (0, [says.replace("%s", str(n)) for n in (1, 2, 3)])
    calls = [words for words, _ in site.calls()]
    assert [[word for word in words if "afterany" in word or "ended" in word] for words in calls] == [
        *([], [waits.format(1)], [waits.format(2)]),
    ]
    site.written.unlink()
    lines = site.printed("gpt-tiny", "--output", "o", "--chain", "3")
    assert [any("JOB_1" in word for word in words) for words in lines] == [False, True, False]


def test_a_chain_ends_where_a_job_is_refused(site: Site) -> None:
    site.scheduler("sbatch", status=5)
    assert site.submit("gpt-tiny", "--output", "o", "--chain", "3").returncode == 5
    assert len(site.calls()) == 1
    site.scheduler("sbatch", "no number")
    done = site.submit("gpt-tiny", "--output", "o", "--chain", "3")
    assert (done.returncode, len(site.calls())) == (2, 2)
    assert "those after it are not submitted" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_mistakes_are_told_before_anything_is_submitted(site: Site, words: list[str], said: str) -> None:
    site.scheduler("sbatch")
    assert said in site.refused("gpt-tiny", *words)
