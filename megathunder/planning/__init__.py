"""What a configuration will hold and compute: parameters, bytes, FLOPs, and whether they fit."""
