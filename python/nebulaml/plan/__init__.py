"""``nebula plan``: computes before a job runs what it needs. Each formula names its source."""
