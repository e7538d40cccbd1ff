"""``nebula plan``: what a job needs, computed before it runs. Each formula names its source."""
