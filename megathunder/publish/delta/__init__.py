"""Sparse deltas: what changed between two versions of the weights, bit for bit, in about one byte a changed element."""
