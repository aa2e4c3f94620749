"""Reproductions of published results by simulation."""
