"""Prediction: the release model in closed form, and replay of traces through the schedule on a virtual clock."""
