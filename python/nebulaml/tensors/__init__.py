"""Converts tensors and pickles to bytes in memory, and back."""
