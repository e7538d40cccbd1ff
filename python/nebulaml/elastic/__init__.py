"""Elastic training: nodes come and go, and the job goes on (docs/elastic.md)."""
