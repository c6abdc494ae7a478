"""Jobs through submitit: what is submitted, what a preempted job does, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from command_line import vitadel
from vitadel.errors import UserError
from vitadel.runtime.launcher import LaunchedCommand, Launcher, launch, read_launcher

SAVES = """
import signal, sys, time
from pathlib import Path
def save(number, frame):
    Path(sys.argv[1]).write_text("saved")
    sys.exit(130)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR2, save)
Path(sys.argv[1]).write_text("started")
while True:
    time.sleep(0.1)  # not for long: Python calls no handler in a sleep that begins just after the signal
"""


def test_settings_are_read():
    assert read_launcher("slurm") == Launcher(None, {})
    wanted = read_launcher("slurm(shards=16, partition=gpu,timeout_min=60)")
    assert wanted == Launcher(16, {"partition": "gpu", "timeout_min": 60})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pbs", "must be slurm"),
        ("slurm(shards=16", "must be slurm"),
        ("slurm(shards=0)", "at least 1, got 0"),
        ("slurm(shards=many)", "at least 1, got 'many'"),
        ("slurm(queue=gpu)", "got 'queue=gpu'; allowed keys: shards, timeout_min"),
        ("slurm(partition)", "got 'partition'"),
    ],
)
def test_wrong_launchers_are_refused(text: str, reason: str):
    with pytest.raises(UserError, match=reason.replace("(", r"\(")):
        read_launcher(text)


def test_commands_refuse_what_cannot_be_submitted(monkeypatch: pytest.MonkeyPatch):
    assert "--launcher needs --out" in vitadel("audit", "--launcher", "slurm(shards=2)", code=2).stderr
    said = vitadel("harden", "shapes/trades", "--launcher", "slurm(shards=2)", "--out", "x", code=2)
    assert "only an audit has shards" in said.stderr
    said = vitadel("audit", "--launcher", "slurm(shards=2)", "--shard", "1/2", "--out", "x", code=2)
    assert "leave out one of the two" in said.stderr
    said = vitadel("harden", "shapes/trades", "train.epochs=none", "--launcher", "slurm", "--out", "x", code=2)
    assert "train.epochs: should be a valid integer" in said.stderr
    jobs = ("--launcher", "slurm(shards=2)", "--out", "x")
    assert "zoo:shapes-robus" in vitadel("audit", "zoo:shapes-robus", *jobs, code=2).stderr
    assert "pdg-20" in vitadel("audit", "--attacks", "pdg-20", *jobs, code=2).stderr
    assert "nothing.parquet" in vitadel("audit", "--data", "parquet:nothing.parquet", *jobs, code=2).stderr
    monkeypatch.setitem(sys.modules, "submitit", None)
    said = vitadel("audit", "--launcher", "slurm(shards=2)", "--out", "x", code=2)
    assert "pip install 'vitadel[slurm]'" in said.stderr


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with Slurm's commands; sbatch keeps the script that it is given."""
    pytest.importorskip("submitit")
    commands = tmp_path / "bin"
    commands.mkdir()
    scripts = {"sbatch": f'cp "$1" {tmp_path}/script.sh; echo Submitted batch job 4242', "srun": ""}
    scripts["scontrol"] = f'echo "$@" >> {tmp_path}/requeued'
    scripts["squeue"] = "echo RUNNING"
    for name, body in scripts.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_audit_becomes_an_array_of_shards(cluster: Path):
    import submitit

    said = vitadel("audit", "--limit=8", "--launcher", "slurm(shards=3,partition=gpu)", "--out", "run", "--json")
    assert "submitted 3 jobs: 4242_0, 4242_1, 4242_2" in said.stderr
    assert "vitadel merge run" in said.stderr
    script = (cluster / "script.sh").read_text()
    for line in ("--array=0-2", "--partition=gpu", "--signal=USR2@90", "--time=1440"):
        assert line in script
    jobs = [submitit.core.utils.DelayedSubmission.load(path) for path in sorted((cluster / "run-jobs").glob("*.pkl"))]
    words = ("audit", "--limit=8", "--out", "run", "--shard")
    assert [job.function.words for job in jobs] == [(*words, f"{number}/3") for number in (1, 2, 3)]
    assert {job.function.folder for job in jobs} == {str(cluster)}


def test_a_training_is_one_job_that_resumes(cluster: Path):
    import submitit

    vitadel("harden", "shapes/trades", "train.epochs=1", "--launcher=slurm", "--out=run")
    (path,) = (cluster / "run-jobs").glob("*.pkl")
    job = submitit.core.utils.DelayedSubmission.load(path)
    assert job.function.words == ("harden", "shapes/trades", "train.epochs=1", "--out=run", "--resume")


def test_a_machine_without_slurm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"could not be submitted to slurm; .*srun"):
        launch(Launcher(), ["audit"], tmp_path / "run")


def test_a_preempted_job_saves_and_is_queued_again(tmp_path: Path):
    submitit = pytest.importorskip("submitit")
    state = tmp_path / "state"
    job = LaunchedCommand((str(state),), str(tmp_path), (sys.executable, "-c", SAVES))
    ended: list[str] = []

    def run() -> None:
        try:
            job()
        except RuntimeError as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 600
    while not (state.exists() and state.read_text() == "started") and time.monotonic() < deadline:
        time.sleep(0.01)
    again = job.checkpoint()
    thread.join()
    assert state.read_text() == "saved"
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert again.function == LaunchedCommand(job.words, job.folder, job.program)
    assert ended[0].endswith("exit code 130")


def test_a_signal_while_the_system_forgets_the_command_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A handler that waits for the lock of the wait that it interrupts waits forever."""
    pytest.importorskip("submitit")
    job = LaunchedCommand((), str(tmp_path), (sys.executable, "-c", ""))
    forget, again = subprocess.Popen._try_wait, []

    def interrupted(process: subprocess.Popen[bytes], options: int) -> tuple[int, int]:
        found = forget(process, options)
        again.append(job.checkpoint())
        return found

    monkeypatch.setattr(subprocess.Popen, "_try_wait", interrupted)
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert [each.function for each in again] == [job]


AS_A_JOB = "import sys; from submitit.core.submission import process_job; process_job(sys.argv[1])"


def started_by_submitit(cluster: Path, program: str) -> tuple[subprocess.Popen[str], Path]:
    """The command as Slurm starts it for submitit, in a group of its own; it writes to the file when it has started."""
    import submitit

    state, jobs = cluster / "state", cluster / "jobs"
    jobs.mkdir()
    command = LaunchedCommand((str(state),), str(cluster), (sys.executable, "-c", program))
    submission = submitit.core.utils.DelayedSubmission(command)
    submission.set_timeout(60, 3)
    submission.dump(jobs / "4242_submitted.pkl")
    environment = {**os.environ, "SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "4242"}
    words = [sys.executable, "-c", AS_A_JOB, str(jobs)]
    job = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (state.exists() and state.read_text() == "started"):
        assert job.poll() is None
        time.sleep(0.01)
    return job, state


SLEEPS = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGUSR2, signal.SIG_IGN)
Path(sys.argv[1]).write_text("started")
while True:
    time.sleep(0.1)  # not for long: Python calls no handler in a sleep that begins just after the signal
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
@pytest.mark.parametrize(("program", "then"), [(SAVES, "saved"), (SLEEPS, "started")], ids=["saves", "too early"])
def test_a_signal_to_all_processes_of_a_job_queues_it_again(
    cluster: Path, number: signal.Signals, program: str, then: str
):
    """SIGTERM is Slurm's, SIGUSR2 submitit's. A command that has no handler yet has nothing to save."""
    import submitit

    job, state = started_by_submitit(cluster, program)
    os.killpg(job.pid, number)
    _, said = job.communicate(timeout=600)
    assert (cluster / "requeued").read_text() == "requeue 4242\n", said
    assert state.read_text() == then
    again = submitit.core.utils.DelayedSubmission.load(cluster / "jobs" / "4242_submitted.pkl")
    assert again.function.words == (str(state),)


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["echo COMPLETING", "exit 1"])
def test_a_cancelled_job_saves_and_is_not_queued_again(cluster: Path, answer: str):
    """`scancel` sends SIGTERM as preemption does, and `scontrol requeue` would bring the job back."""
    (cluster / "bin" / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
    job, state = started_by_submitit(cluster, SAVES)
    os.killpg(job.pid, signal.SIGTERM)
    _, said = job.communicate(timeout=600)
    assert not (cluster / "requeued").exists()
    assert state.read_text() == "saved"
    assert "ended with exit code 130" in said


def test_a_job_that_is_preempted_before_it_begins_is_queued_again(tmp_path: Path):
    pytest.importorskip("submitit")
    job = LaunchedCommand(("audit",), str(tmp_path))
    assert job.checkpoint().function == job


def test_a_job_that_cannot_save_is_not_queued_again(tmp_path: Path):
    job = LaunchedCommand((), str(tmp_path), (sys.executable, "-c", "import sys; sys.exit(3)"))
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        job()
    with pytest.raises(RuntimeError, match="could not save its state: exit code 3"):
        job.checkpoint()
