"""Commands from the coordinator to a cell of ranks and answers back."""
