"""Are the numbers still those of transformers and sentence-transformers? The only importer of those libraries
as references.
"""

from toolkit.parity.harness import verify, verify_folder
from toolkit.parity.report import Cell, ParityReport
from toolkit.parity.rule import TOLERANCES, Tolerance

__all__ = ["TOLERANCES", "Cell", "ParityReport", "Tolerance", "verify", "verify_folder"]
