"""Scripts that make the example policies."""
