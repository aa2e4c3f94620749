from pathlib import Path


def test_the_ranking():
    assert Path("/app/ranking.txt").read_text().split() == ["ada", "ken", "mia", "bob"]
