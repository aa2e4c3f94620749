"""Forward and backward passes: packing, the prefix cut, log-probabilities, and what each release point runs."""
