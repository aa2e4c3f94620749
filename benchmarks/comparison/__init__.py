"""Comparing variants within one run: alternation, differences, tables, figures."""
