"""Nebula against other ways to save, and all of them against what the machine can do."""
