from pathlib import Path


def test_the_count():
    assert Path("/app/words.txt").read_text().split() == ["9"]


def test_the_text_is_untouched():
    assert Path("/app/text.txt").read_text().count("\n") == 3
