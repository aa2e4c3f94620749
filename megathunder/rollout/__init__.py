"""SGLang servers, the client in front of them, and the agent loop that turns tasks into trajectories."""
