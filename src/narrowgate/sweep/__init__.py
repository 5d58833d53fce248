"""Sweeps: one recipe over a grid or a range of values, many runs at once, on Ray Tune."""
