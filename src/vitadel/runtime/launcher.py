"""Jobs of a cluster, through submitit: `--launcher slurm(shards=16,partition=gpu)`.

Each job runs one command of vitadel. When the cluster announces preemption, the command saves its state and ends, and
the job is queued again.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitadel.errors import UserError
from vitadel.runtime.run_shards import Shard

SLURM = "slurm"
_OF_ALL = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")  # what submitit passes to every kind of cluster
_OF_SLURM = ("partition", "account", "qos", "constraint", "exclude", "nodelist", "array_parallelism", "signal_delay_s")
_DEFAULTS = {"timeout_min": 1440}
_PREEMPTED = (130, -signal.SIGTERM)  # saved; or ended before it had anything to save
_GOES_ON = ("RUNNING", "SIGNALING")  # states of Slurm; a job that was cancelled is COMPLETING
_MOST_SHARDS = 10_000  # jobs: clusters limit arrays to fewer


@dataclass(frozen=True)
class Launcher:
    """How many shards there are, and what submitit is asked for."""

    shards: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def read_launcher(text: str) -> Launcher:
    """'slurm(shards=16,partition=gpu)': the kind of cluster, and settings in brackets."""
    found = re.fullmatch(r"(\w+)(?:\(([^()]*)\))?", text.strip())
    if not found or found[1] != SLURM:
        raise UserError(
            f"--launcher must be slurm, with settings in brackets as in slurm(shards=16,partition=gpu); got {text!r}"
        )
    settings: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in (found[2] or "").split(","))):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if name not in ("shards", *_OF_ALL, *_OF_SLURM) or not equals or not value:
            allowed = ", ".join(("shards", *_OF_ALL, *_OF_SLURM))
            raise UserError(f"--launcher takes KEY=VALUE in brackets, got {pair!r}; allowed keys: {allowed}")
        settings[name] = int(value) if value.isdecimal() else value
    shards = settings.pop("shards", None)
    if shards is not None and (not isinstance(shards, int) or not 1 <= shards <= _MOST_SHARDS):
        raise UserError(f"--launcher: shards must be a number, at most {_MOST_SHARDS} and at least 1, got {shards!r}")
    return Launcher(shards, settings)


@dataclass
class LaunchedCommand:
    """A command as a job; `program` is what runs vitadel.

    Slurm announces preemption by SIGTERM to all processes of a job, and by submitit's own signal to those that it was
    asked for. submitit queues a job again at its own signal only, so a command that the first one has ended passes it
    on, while Slurm lets the job go on.
    """

    words: tuple[str, ...]
    folder: str  # where it was typed: paths may be relative
    program: tuple[str, ...] = (sys.executable, "-m", "vitadel")
    process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False, compare=False)
    code: int | None = field(default=None, init=False, repr=False, compare=False)

    def __call__(self) -> int:
        self.process = subprocess.Popen([*self.program, *self.words], cwd=self.folder)
        code = self._exit_code(self.process)
        self.process.wait()  # the system can forget it now
        if code in _PREEMPTED:
            _queue_again()  # does not return where submitit listens
        if code:
            raise RuntimeError(f"vitadel {' '.join(self.words)} ended with exit code {code}")
        return code

    def checkpoint(self) -> Any:
        """Called by submitit when the job is about to be preempted: save, end, and queue the same command again."""
        if self.process is not None:
            if self.code is None:
                os.kill(self.process.pid, signal.SIGTERM)  # `send_signal` would take the code of one that has ended
            code = self._exit_code(self.process)
            if code not in (0, *_PREEMPTED):
                raise RuntimeError(f"vitadel {' '.join(self.words)} could not save its state: exit code {code}")
        return _submitit().helpers.DelayedSubmission(LaunchedCommand(self.words, self.folder, self.program))

    def _exit_code(self, process: subprocess.Popen[bytes]) -> int:
        """Wait without a lock: `checkpoint` runs in a signal handler, at any point of another wait.

        `Popen.wait` holds a lock when the system forgets the process, so the code is kept here before.
        """
        if self.code is None:
            try:
                found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:  # another thread was faster, and has kept the code
                found = None
            if found is not None:
                self.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        assert self.code is not None
        return self.code


def _queue_again() -> None:
    """Give this process the signal at which submitit queues its job again; nothing where nobody listens to it."""
    number = getattr(signal, f"SIG{_submitit().JobEnvironment.USR_SIG}")
    if callable(signal.getsignal(number)) and _job_goes_on():
        signal.raise_signal(number)


def _job_goes_on() -> bool:
    """Whether Slurm lets this job run: `scancel` sends SIGTERM, too, and Slurm queues cancelled jobs if it is asked."""
    words = ["squeue", "--noheader", "--format=%T", f"--jobs={os.environ.get('SLURM_JOB_ID')}"]
    try:
        asked = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.stdout.strip() in _GOES_ON


def launch(launcher: Launcher, words: Sequence[str], out: Path) -> list[str]:
    """Submit the command, one job for each shard or one for all of it; returns the ids of the jobs.

    Job scripts and logs go to a folder beside the run folder: the run folder belongs to the run.
    """
    submitit = _submitit()
    commands = [tuple(words)]
    if launcher.shards is not None:
        shards = [Shard(number, launcher.shards) for number in range(1, launcher.shards + 1)]
        commands = [(*words, "--shard", str(shard)) for shard in shards]
    jobs = [LaunchedCommand(command, str(Path.cwd())) for command in commands]
    given = {**_DEFAULTS, **launcher.parameters}
    parameters = {name if name in _OF_ALL else f"slurm_{name}": value for name, value in given.items()}
    try:
        executor = submitit.AutoExecutor(folder=str(out.with_name(f"{out.name}-jobs")), cluster=SLURM)
        executor.update_parameters(name="vitadel", **parameters)
        with executor.batch():
            started = [executor.submit(job) for job in jobs]
    except (RuntimeError, OSError, NameError, AssertionError, TypeError) as error:
        raise UserError(
            "the jobs could not be submitted to slurm; start this command on a machine of the cluster. submitit says: "
            f"{error}"
        ) from error
    except submitit.core.utils.FailedJobError as error:
        raise UserError(f"sbatch refused the jobs: {error}") from error
    return [str(job.job_id) for job in started]


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError:
        raise UserError("--launcher needs submitit, which is not installed: pip install 'vitadel[slurm]'") from None
