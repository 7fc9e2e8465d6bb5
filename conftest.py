"""Keep the repository root off sys.path, so `import kernels` can only mean an installed package."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
