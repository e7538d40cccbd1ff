"""The manager: it decides when to save and which versions to keep, and restores them."""
