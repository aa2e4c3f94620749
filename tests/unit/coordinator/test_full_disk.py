"""What the operating system refuses ends a run with one message, not with tracebacks: a full disk above all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_loop import settings

from megathunder import launch
from megathunder.config.toml import to_toml
from megathunder.coordinator import process
from megathunder.learner.checkpoint import checkpoint_status
from megathunder.learner.transport import worker
from megathunder.process_exit import describe_os_error, system_error
from megathunder.tracing import Recorder
from megathunder.types import Failed, SaveCheckpoint


class FullFile:
    """An open file that takes no more; `name` is not asked of it but of the real one that it stands for."""

    def __init__(self, real: object) -> None:
        self.real = real

    def close(self) -> None:
        self.real.close()

    def write(self, _: bytes) -> None:
        real = self.real  # noqa: F841 (in hand where the error is raised)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full(path: Path) -> None:
    recorder = Recorder(path / "events.jsonl")
    recorder._file = FullFile(recorder._file)  # type: ignore[assignment]
    recorder.write("run", "start", 0.0, 0.0)
    recorder.close()  # the thread that writes has the error by then


def test_a_full_disk_behind_groups_of_errors_is_one_message_of_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run(*_: object) -> None:
        try:
            try:
                full(tmp_path)
            except OSError as error:
                raise ExceptionGroup("unhandled errors in a TaskGroup", [error, error]) from None
        finally:
            raise ValueError("I/O operation on closed file")  # of what is taken down on the way out

    config = settings(run={"folder": str(tmp_path), "name": "full"})
    (tmp_path / "config.toml").write_text(to_toml(config))
    monkeypatch.setenv("MEGATHUNDER_TOKEN", "t")
    monkeypatch.setattr(process, "run", run)
    assert process.main(str(tmp_path / "config.toml"), "1", "127.0.0.1", "-1") == 1
    said = capfd.readouterr().err
    assert said.startswith(f"error: {tmp_path}/events.jsonl could not be written: No space left on device (")
    assert said.count("error:") == 1 and "Traceback" not in said
    for words in (" MiB free of ", "expected: room", "run.folder", "no checkpoint was saved"):
        assert words in said


def test_a_full_disk_is_one_message_of_a_learner_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = SimpleNamespace(forward=lambda _: None, stop=lambda _: 0, alive=lambda: False)
    monkeypatch.setattr(launch, "CoordinatorProcess", lambda *_: ended)
    monkeypatch.setattr(launch, "_on_signals", lambda _: None)
    monkeypatch.setattr(launch, "_learn", lambda *_: full(tmp_path))
    assert launch.run_rank(settings(), tmp_path) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"error: learner rank 0: {tmp_path}/events.jsonl could not be written: No space")
    assert "Traceback" not in said


def test_a_command_that_fails_by_a_full_disk_is_answered_without_a_traceback(tmp_path: Path) -> None:
    def save(_: object) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")  # as safetensors says it

    told: list[Failed] = []
    command = SaveCheckpoint(item=0, folder=str(tmp_path), background=False)
    link = SimpleNamespace(receive=lambda: command, send=told.append, speaks=True)
    with pytest.raises(worker.InfrastructureFailure):
        worker.serve(link, 0, {SaveCheckpoint: save})  # type: ignore[arg-type, dict-item]
    assert f"a file of {tmp_path} could not be written: No space" in told[0].error
    assert "remedy:" in told[0].error and "Traceback" not in told[0].error


def test_a_rank_tells_on_a_full_disk_in_the_room_it_has_taken_before(tmp_path: Path) -> None:
    checkpoint_status.reserve(tmp_path, 3)
    (file,) = tmp_path.iterdir()
    before = file.stat()
    checkpoint_status.write(tmp_path, 3, "it is full")
    after = (tmp_path / "written_00003").stat()
    assert (after.st_ino, after.st_size, after.st_blocks) == (before.st_ino, before.st_size, before.st_blocks)
    assert checkpoint_status.read_all(tmp_path) == {3: "it is full"}


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    missing = ValueError("wrong")
    missing.__context__ = FileNotFoundError(errno.ENOENT, "No such file")
    for error in (missing, TimeoutError(), ExceptionGroup("", [KeyError("x"), missing])):
        assert system_error(error) is None
    refused = OSError(errno.EMFILE, "Too many open files")
    assert system_error(ExceptionGroup("", [refused, KeyError("x")])) is refused


def test_a_refusal_that_names_no_file_is_not_blamed_on_one(tmp_path: Path) -> None:
    class Listener:
        def __init__(self) -> None:
            self._folder = tmp_path / "run"

        def bind(self) -> None:
            raise OSError(errno.EADDRINUSE, "Address already in use")

    with pytest.raises(OSError) as caught:
        Listener().bind()
    assert describe_os_error(caught.value, tmp_path, "start again").startswith("Address already in use (at ")
