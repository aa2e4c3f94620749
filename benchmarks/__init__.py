"""Measurements: comparisons of schedules, benches, peers, and reproductions of the papers."""
