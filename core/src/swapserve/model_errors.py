"""What can be wrong with a model that was named; each message is one sentence that says what to do."""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """There is no such model."""


class UnsupportedModel(ModelError):
    """The model is there, but its architecture does something that is not supported."""
