"""Elastic training: nodes may come and go while the job goes on (docs/elastic.md)."""
