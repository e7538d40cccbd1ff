"""Tensors and pickles as bytes in memory, and back."""
