"""Compares Nebula with other ways to save, and all of them with the limits of the machine."""
