"""Stand-in for IPython, which SGLang imports for notebook helpers that no server calls."""
