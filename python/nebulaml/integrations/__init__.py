"""Frameworks that are taken over by their own hooks, and what these adapters share."""
