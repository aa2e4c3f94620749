"""Accounts with whole-number amounts."""


class Overdrawn(Exception):
    """A withdrawal exceeds the balance and the credit."""


class Account:
    """A balance that never falls below minus the credit."""

    def __init__(self, credit=0):
        self.balance = 0
        self.credit = credit
        self.entries = []

    def deposit(self, amount):
        """Add a positive amount."""
        if amount <= 0:
            raise ValueError(f"amount {amount} is not positive")
        self.balance += amount
        self.entries.append(amount)

    def withdraw(self, amount):
        """Take a positive amount; raises Overdrawn and changes nothing if it is not there."""
        if amount <= 0:
            raise ValueError(f"amount {amount} is not positive")
        if self.balance - amount < -self.credit:
            raise Overdrawn(f"{amount} of {self.balance}")
        self.balance -= amount
        self.entries.append(-amount)

    def lowest(self):
        """The lowest balance there ever was, 0 for a new account."""
        balance = low = 0
        for entry in self.entries:
            balance += entry
            low = min(low, balance)
        return low


def transfer(source, target, amount):
    """Move an amount; nothing moves if the source is overdrawn."""
    source.withdraw(amount)
    target.deposit(amount)


def totals(rows):
    """{account: sum of amounts} of (account, amount) rows; accounts whose sum is 0 are left out."""
    sums = {}
    for account, amount in rows:
        sums[account] = sums.get(account, 0) + amount
    return {account: total for account, total in sums.items() if total != 0}


def ranking(rows):
    """Accounts from the highest total to the lowest, equal totals by name."""
    return sorted(totals(rows).items(), key=lambda item: (-item[1], item[0]))


def split_evenly(amount, ways):
    """Whole shares that add up to the amount and differ by at most 1, larger ones first."""
    share, rest = divmod(amount, ways)
    return [share + 1] * rest + [share] * (ways - rest)
