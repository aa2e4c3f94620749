"""Agent loops that turn tasks into trajectories, and the recorder of their exact tokens."""
