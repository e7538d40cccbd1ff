"""Metrics of steps, and trackers that are told of versions."""
