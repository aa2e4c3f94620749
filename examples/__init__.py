"""Example configurations and what they need."""
