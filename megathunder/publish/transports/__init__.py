"""Ways for the weights to reach the servers; `build.py` chooses by configuration."""
