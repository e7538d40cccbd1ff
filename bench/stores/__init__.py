"""``make bench-stores``: transfers to an object store on this machine, and jobs that persist to one."""
