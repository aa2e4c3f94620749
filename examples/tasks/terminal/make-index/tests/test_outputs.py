from pathlib import Path


def lines():
    return Path("/app/index.txt").read_text().splitlines()


def test_every_file_is_there():
    assert sorted(line.split()[1] for line in lines()) == ["about", "home", "news"]


def test_sizes_in_order():
    assert lines() == ["10 news", "6 home", "2 about"]
