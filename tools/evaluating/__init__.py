"""Parts of tools/evaluate.py."""
