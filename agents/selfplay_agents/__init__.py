"""First-party agents, found through entry points of group ``selfplay.agents``."""
