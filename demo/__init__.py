"""The main job, end to end: train, save in milliseconds, lose the process, resume exactly."""
