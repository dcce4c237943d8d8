"""How long a test waits for what must happen: it only ends a test that hangs, on however loaded a machine."""

PATIENCE_S = 180.0
