"""The command `megathunder`: its words start what they say, and a wrong one is answered with the nearest."""

from __future__ import annotations

import pytest

from megathunder.cli import command


@pytest.mark.parametrize("name", [name for name, word in command.WORDS.items() if word.target])
def test_every_word_of_the_package_names_a_function(name: str) -> None:
    assert callable(command.resolve(command.WORDS[name].target))


@pytest.mark.parametrize("name", [name for name, word in command.WORDS.items() if word.tool])
def test_every_word_of_a_checkout_names_a_script_and_says_so_where_there_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    assert (command.CHECKOUT / command.WORDS[name].tool).is_file()
    monkeypatch.setattr(command, "CHECKOUT", tmp_path)
    assert command.main([name]) == 2
    assert "a checkout of the project" in capsys.readouterr().err


def test_an_unknown_word_is_answered_with_the_nearest_and_all(capsys: pytest.CaptureFixture) -> None:
    assert command.main(["trian"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'train'?" in said and all(name in said for name in command.WORDS)


def test_no_word_prints_the_usage(capsys: pytest.CaptureFixture) -> None:
    assert command.main([]) == 2 and command.main(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: megathunder") == 2
