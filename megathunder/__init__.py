"""megathunder: agentic RL whose learner differentiates while the rollouts still run, and stays exactly synchronous."""

__version__ = "0.1.0"
