import pytest
from ledger import Account, Overdrawn, ranking, split_evenly, totals, transfer


def account(balance, credit=0):
    made = Account(credit)
    made.deposit(balance)
    return made


def test_a_deposit_raises_the_balance():
    assert account(5).balance == 5


def test_amounts_must_be_positive():
    with pytest.raises(ValueError):
        Account().deposit(0)
    with pytest.raises(ValueError):
        account(5).withdraw(0)


def test_everything_can_be_withdrawn():
    made = account(5)
    made.withdraw(5)
    assert made.balance == 0 and made.entries == [5, -5]


def test_more_than_everything_is_refused_and_changes_nothing():
    made = account(5)
    with pytest.raises(Overdrawn):
        made.withdraw(6)
    assert made.balance == 5


def test_credit_is_available():
    made = account(5, credit=3)
    made.withdraw(8)
    assert made.balance == -3
    with pytest.raises(Overdrawn):
        made.withdraw(1)


def test_the_lowest_balance_is_remembered():
    made = account(5, credit=9)
    made.withdraw(8)
    made.deposit(10)
    assert made.lowest() == -3 and Account().lowest() == 0


def test_a_transfer_moves_an_amount():
    source, target = account(5), account(1)
    transfer(source, target, 4)
    assert (source.balance, target.balance) == (1, 5)


def test_totals_leave_out_zero():
    assert totals([("a", 3), ("b", 2), ("a", -3)]) == {"b": 2}


def test_totals_add_up():
    assert totals([("a", 3), ("a", 4)]) == {"a": 7}


def test_ranking_is_by_total_then_name():
    assert ranking([("c", 1), ("a", 1), ("b", 5)]) == [("b", 5), ("a", 1), ("c", 1)]


def test_even_split():
    assert split_evenly(10, 4) == [3, 3, 2, 2]


def test_split_without_a_rest():
    assert split_evenly(9, 3) == [3, 3, 3]
