"""Starting runs and engines: the local launcher, and what the commands train, resume and play call."""
