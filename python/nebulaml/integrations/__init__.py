"""Adapters of frameworks, which use the frameworks' own hooks, and the parts that these adapters share."""
