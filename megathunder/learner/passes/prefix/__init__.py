"""Cuts at the keys and values of earlier tokens: turns released before their trajectory ends, and shared prompts.

cache.py     keys and values that outlive their pass, and the gradients deferred to them
eager.py     release "turn": forward and backward of each turn, one replay at the end
forward.py   release "turn_forward": forward of each turn, one reverse pass at the end
prompt.py    the prompt of a group, once for all its trajectories
"""
