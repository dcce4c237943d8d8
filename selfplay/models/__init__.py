"""Names of base models → checked folders on disk. Importing this imports neither torch nor transformers."""

from selfplay.models.folder import ResolvedModel
from selfplay.models.resolve import BUILT_IN, resolve_model

__all__ = ["BUILT_IN", "ResolvedModel", "resolve_model"]
