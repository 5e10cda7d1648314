"""Every error that this package raises on purpose.

The command line prints the message of a `ToolkitError` on one line and exits with its `exit_status`.
Each message names the field, tensor or file and says what to do.
"""

from typing import Any

__all__ = [
    "ArtifactError",
    "BoundaryError",
    "CheckpointError",
    "GraphError",
    "InputError",
    "MissingDependencyError",
    "ParityError",
    "ToolkitError",
    "UnsupportedError",
]


class ToolkitError(Exception):
    """Base class. `exit_status` is what the command line exits with."""

    exit_status = 2


class CheckpointError(ToolkitError):
    """The source checkpoint is missing, malformed, hostile, or contradicts itself."""


class UnsupportedError(ToolkitError):
    """The checkpoint or the request is valid, but cannot be served exactly."""


class ArtifactError(ToolkitError):
    """A converted folder is missing, damaged, or in the way."""


class InputError(ToolkitError, ValueError):
    """A caller's texts, ids, embeddings or options are not acceptable."""


class MissingDependencyError(ToolkitError):
    """An optional library or tool is needed and not installed."""


class BoundaryError(ToolkitError):
    """A compiled graph does not cover what the compile boundary promises."""


class GraphError(ToolkitError):
    """A captured graph was about to read memory that it does not own."""


class ParityError(ToolkitError):
    """The converted module's numbers are not those of the reference. `report` holds the details."""

    exit_status = 1

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report
