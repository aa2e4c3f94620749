import subprocess
from pathlib import Path

SAVED = Path("/app/saved")


def test_the_script_runs_again():
    assert subprocess.run(["bash", "/app/backup.sh"]).returncode == 0


def test_notes_are_saved():
    assert (SAVED / "a.txt").read_text() == "one\n" and (SAVED / "b.txt").is_file() and not (SAVED / "c.log").exists()


def test_the_count():
    assert (SAVED / "count").read_text().strip() == "2"
