"""The file of a study: written, read meanwhile, cut off, damaged, and in SQLite."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import optuna
import pytest
from kernels import SECONDS
from optuna.storages.journal import JournalFileBackend

from nbtoolkit.errors import SweepError
from nbtoolkit.search.study.study import FILE, FileLock, open_journal, read_study

RATE = optuna.distributions.FloatDistribution(0, 1)


def test_threads_that_share_a_journal_write_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / FILE).touch()
    backend = JournalFileBackend(str(tmp_path / FILE), FileLock(tmp_path / FILE))

    def append(thread: int) -> None:
        for number in range(20):
            backend.append_logs([{"thread": thread, "number": number}])

    threads = [threading.Thread(target=append, args=(n,), daemon=True) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    logs = [(log["thread"], log["number"]) for log in backend.read_logs(0)]
    assert sorted(logs) == [(thread, number) for thread in range(10) for number in range(20)]
    assert [number for thread, number in logs if thread == 3] == list(range(20))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A study of four trials."""
    add_trials(tmp_path / FILE, 4)
    return tmp_path / FILE


def add_trials(file: Path, count: int) -> None:
    storage = open_journal(file)
    study = optuna.create_study(storage=storage, study_name="digits", load_if_exists=True)
    for _ in range(count):
        study.tell(study.ask({"x": RATE}), 0.5)


def trials(file: Path) -> int:
    return len(read_study(file).trials)


def test_a_study_is_read_while_it_is_written_and_cannot_be_changed(file: Path) -> None:
    study = read_study(file)
    add_trials(file, 2)
    assert len(study.trials) == 6
    with pytest.raises(SweepError, match=r"opened for reading(.|\n)*optuna\.copy_study"):
        study.ask()
    assert [path.name for path in file.parent.iterdir()] == [FILE]


def test_a_study_is_read_from_a_folder_that_cannot_be_written(file: Path) -> None:
    file.chmod(0o444)
    file.parent.chmod(0o555)
    try:
        assert trials(file) == 4
    finally:
        file.parent.chmod(0o755)


WRITES = """
import sys
import optuna
from nbtoolkit.search.study.study import open_journal
optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(storage=open_journal(sys.argv[1]), study_name="digits")
for number in range(10_000):
    trial = study.ask({"x": optuna.distributions.FloatDistribution(0, 1)})
    trial.set_user_attr("long", "x" * 100_000)
    study.tell(trial, 0.5)
    print(number + 1, flush=True)
"""


def test_a_study_whose_writer_was_killed_inside_a_write_is_opened_at_once(tmp_path: Path) -> None:
    file = tmp_path / FILE
    program = f"from pathlib import Path\n{WRITES.replace('sys.argv[1]', 'Path(sys.argv[1])')}"
    command = [sys.executable, "-c", program, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(20)]
        os.kill(process.pid, signal.SIGKILL)
        told += [int(line) for line in process.stdout]
        process.wait(SECONDS)
    with file.open("ab") as opened:
        opened.write(b'{"op_code": 6, "worker_id": "half a li')
    before = time.monotonic()
    add_trials(file, 1)
    assert time.monotonic() - before < 1 + SECONDS / 10  # Optuna's own lock would cost 30 s
    assert trials(file) in (told[-1] + 1, told[-1] + 2)
    assert all(line.endswith(b"}\n") for line in file.read_bytes().splitlines(keepends=True))


def test_a_study_in_sqlite_is_refused_with_the_way_out(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(storage=url, study_name="digits")
    study.tell(study.ask({"x": RATE}), 0.5)
    with pytest.raises(SweepError, match=r"study\.db cannot be read[\s\S]*optuna\.copy_study"):
        trials(tmp_path / "study.db")


def test_a_study_that_is_missing_damaged_or_empty_is_told(file: Path, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"the study none\.jsonl cannot be read"):
        trials(tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b"no journal\n", *lines[1:]]))
    with pytest.raises(SweepError, match=r"the study study\.jsonl cannot be read: JSONDecodeError"):
        trials(file)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SweepError, match=r"the study empty\.jsonl holds 0 studies"):
        trials(tmp_path / "empty.jsonl")
