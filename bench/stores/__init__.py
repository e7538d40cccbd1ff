"""``make bench-stores``: measures transfers to an object store on this machine, and jobs that persist to it."""
