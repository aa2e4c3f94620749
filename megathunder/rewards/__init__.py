"""What an attempt earned: verifiers that run in clean sandboxes, and the artifacts they are given."""
