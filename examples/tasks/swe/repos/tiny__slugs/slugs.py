"""Short names for texts."""

import re


def slug(text, limit=20):
    """Lower-case ASCII words joined by single dashes, at most `limit` characters, no dash at either end."""
    joined = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return joined[:limit].rstrip("-")


def unique(name, taken):
    """The name itself if it is free, else the first free one of name-2, name-3, ..."""
    if name not in taken:
        return name
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}"


def initials(text):
    """The upper-case first letters of the words of a text."""
    return "".join(word[0].upper() for word in text.split() if word[0].isalpha())


def shorten(text, width):
    """The text cut at a word to at most `width` characters; three dots mark the cut."""
    if len(text) <= width:
        return text
    kept = text[: width - 2].rsplit(" ", 1)[0]
    return kept[: width - 3] + "..."


def counted(number, noun):
    """`1 file`, `2 files`, `no files`."""
    if number == 0:
        return f"no {noun}s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def is_slug(text):
    """Whether a text is already a slug."""
    return bool(text) and slug(text, len(text)) == text
