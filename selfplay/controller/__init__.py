"""The loop of a run and the links to the processes it drives."""
