"""Small policies that the examples start from."""
