"""Naive references that fast paths are tested against."""
