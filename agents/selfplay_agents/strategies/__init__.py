"""Fixed strategies, one file per game; `selfplay_agents.scripted` lists them."""
