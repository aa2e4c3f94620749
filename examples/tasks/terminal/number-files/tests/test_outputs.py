from pathlib import Path

NOTES = Path("/app/notes")


def test_contents_moved_up():
    found = {path.name: path.read_text() for path in NOTES.iterdir()}
    assert found == {"2.txt": "first\n", "3.txt": "second\n", "4.txt": "third\n"}


def test_the_highest_number():
    assert Path("/app/highest").read_text().strip() == "4"
