"""Published weights: a trainer names its weights at a step, and engines on any machine follow them. docs/publish.md."""
