"""Metrics of steps, and trackers that record versions."""
