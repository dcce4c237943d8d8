"""First-party environments, found through entry points of group ``selfplay.environments``."""
