"""Checkpoints of a run: atomic folders, the coordinator's state, what resuming may change."""
