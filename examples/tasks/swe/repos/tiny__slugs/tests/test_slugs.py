import pytest
from slugs import counted, initials, is_slug, shorten, slug, unique


def test_words_are_joined_by_dashes():
    assert slug("Hello World") == "hello-world"


def test_marks_collapse_into_one_dash():
    assert slug("C++ -- and   C#!") == "c-and-c"


def test_a_slug_keeps_its_limit():
    assert slug("a" * 50) == "a" * 20


def test_a_cut_leaves_no_dash_at_the_end():
    assert slug("abc def", 4) == "abc"


def test_a_free_name_is_kept():
    assert unique("a", {"b"}) == "a"


def test_a_taken_name_gets_the_first_free_number():
    assert unique("a", {"a", "a-2"}) == "a-3"
    assert unique("a", {"a"}) == "a-2"


def test_initials_of_words():
    assert initials("grace brewster murray hopper") == "GBMH"


def test_initials_leave_out_numbers():
    assert initials("area 51 base") == "AB"


def test_a_short_text_is_kept():
    assert shorten("one two", 7) == "one two"


def test_a_long_text_is_cut_at_a_word():
    assert shorten("one two three", 10) == "one two..."


@pytest.mark.parametrize(("number", "text"), [(0, "no files"), (1, "1 file"), (2, "2 files")])
def test_counted_nouns(number, text):
    assert counted(number, "file") == text


def test_what_is_a_slug():
    assert is_slug("hello-world") and not is_slug("Hello") and not is_slug("")
