"""selfplay environments in the clothes of other libraries. Each module imports its library; nothing here does."""
