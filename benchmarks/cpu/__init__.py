"""What the kernels of a CPU-only machine save: the engine's decode step, the learner's forward and backward."""
