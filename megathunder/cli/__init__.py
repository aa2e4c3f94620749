"""The command `megathunder` and what its words start."""
