"""Times of day as minutes after midnight."""

DAY = 24 * 60


def parse(text):
    """`7:05` -> 425; raises ValueError for times that no clock shows."""
    hours, minutes = (int(part) for part in text.split(":"))
    if not (0 <= hours < 24 and 0 <= minutes < 60):
        raise ValueError(f"{text} is no time of day")
    return hours * 60 + minutes


def show(minutes):
    """425 -> `07:05`; whole days are dropped."""
    return f"{minutes % DAY // 60:02d}:{minutes % 60:02d}"


def between(start, stop):
    """Minutes from one time of day to the next occurrence of the other."""
    return (stop - start) % DAY


def overlap(first, second):
    """Minutes that two (start, stop) shifts of one day share."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def rounded(minutes, step):
    """The nearest multiple of `step`; halves go up."""
    return (minutes + step // 2) // step * step


def next_of(times, now):
    """The first of the times at or after now, else the first of the next day; None without any."""
    later = sorted(time for time in times if time >= now)
    if later:
        return later[0]
    return min(times) if times else None


def spoken(minutes):
    """`half past 7`, `quarter to 8`, `7:05`, `8 o'clock`; hours as on the dial, 1 to 12."""
    hour, past = minutes // 60, minutes % 60
    dial = (hour - 1) % 12 + 1
    if past == 0:
        return f"{dial} o'clock"
    if past == 15:
        return f"quarter past {dial}"
    if past == 30:
        return f"half past {dial}"
    if past == 45:
        return f"quarter to {dial % 12 + 1}"
    return f"{dial}:{past:02d}"
