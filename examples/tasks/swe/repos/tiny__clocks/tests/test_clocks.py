import pytest
from clocks import between, next_of, overlap, parse, rounded, show, spoken


def test_parse():
    assert parse("7:05") == 425


@pytest.mark.parametrize("text", ["24:00", "12:60", "-1:00"])
def test_impossible_times_are_refused(text):
    with pytest.raises(ValueError):
        parse(text)


def test_midnight_is_a_time():
    assert parse("0:00") == 0 and parse("23:59") == 1439


def test_show_pads():
    assert show(425) == "07:05"


def test_show_drops_days():
    assert show(1440 + 61) == "01:01"


def test_between_within_a_day():
    assert between(60, 90) == 30


def test_between_over_midnight():
    assert between(1430, 10) == 20


def test_overlap():
    assert overlap((60, 120), (90, 200)) == 30


def test_shifts_that_touch_do_not_overlap():
    assert overlap((60, 90), (90, 120)) == 0
    assert overlap((60, 80), (90, 120)) == 0


@pytest.mark.parametrize(("minutes", "nearest"), [(7, 0), (8, 15), (22, 15), (23, 30)])
def test_rounded(minutes, nearest):
    assert rounded(minutes, 15) == nearest


def test_next_time_today():
    assert next_of([60, 600, 300], 100) == 300


def test_now_counts_as_next():
    assert next_of([60, 300], 300) == 300


def test_next_time_tomorrow():
    assert next_of([60, 300], 500) == 60 and next_of([], 5) is None


@pytest.mark.parametrize(
    ("minutes", "text"),
    [(480, "8 o'clock"), (450, "half past 7"), (465, "quarter to 8"), (435, "quarter past 7"), (785, "1:05")],
)
def test_spoken(minutes, text):
    assert spoken(minutes) == text


def test_noon_is_twelve():
    assert spoken(720) == "12 o'clock" and spoken(765) == "quarter to 1"
