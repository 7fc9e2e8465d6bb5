"""The errors a user can meet.

HexiSeqError(ValueError)
├── ConfigError        a file or an argument is wrong: which field, its value, what fits
├── PlanError          a plan contradicts itself, its file, or the processes that should run it
├── InfeasibleError    no plan exists: the binding constraint
├── InputError         tensors or lengths that don't fit the plan or the layout
└── PeerError          another rank failed or stopped answering
"""


class HexiSeqError(ValueError):
    """Base of every error this package raises on purpose."""


class ConfigError(HexiSeqError):
    """A file or an argument is wrong."""


class PlanError(HexiSeqError):
    """A plan contradicts itself, its file, or the processes that should run it."""


class InfeasibleError(HexiSeqError):
    """No plan satisfies the constraints; the message names the one that binds."""


class InputError(HexiSeqError):
    """Tensors or lengths don't fit the plan or the layout."""


class PeerError(HexiSeqError):
    """Another rank failed or stopped answering."""
