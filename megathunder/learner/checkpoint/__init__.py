"""What a learner rank saves and restores."""
