"""Child processes of a run: started by spawn, tied to their parent's life, logged, and cleaned up after."""

from selfplay.process.child import Child, spawn, tail_of
from selfplay.process.guard import live_with_parent
from selfplay.process.runtime import RuntimeDir

__all__ = ["Child", "RuntimeDir", "live_with_parent", "spawn", "tail_of"]
