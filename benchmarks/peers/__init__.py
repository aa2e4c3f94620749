"""Other trainers on the same work."""
