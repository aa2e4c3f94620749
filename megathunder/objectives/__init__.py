"""Objectives: what a contribution waits for, how it is weighted, and what an update is divided by."""
