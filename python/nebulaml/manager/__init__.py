"""The manager: when to save, what to keep, how to come back."""
