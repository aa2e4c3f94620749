"""How many trajectories a group gets: fixed, or by straggler-aware group control (`sagc.py`)."""
