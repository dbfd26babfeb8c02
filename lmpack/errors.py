"""The errors lmpack raises on purpose; anything else is a bug and may show a traceback.

LmpackError                 exit code 1
├── UsageError              exit code 2: a flag or an argument is wrong
├── CheckpointError         a source GGUF or safetensors is broken, incomplete or lies
├── PackError               a pack is broken
│   └── ManifestError       its manifest.json cannot be trusted
├── ProfileError            a routing profile or trace is broken, or does not fit another one
├── UnsupportedError        sound input that this version cannot run (architecture, dtype, pre-tokenizer)
├── BudgetError             a memory budget below what the model needs; names the smallest that works
└── StorageError            the drive refused: no space, no inodes, read-only, a read that failed

A message says where, what, what was expected, and what to do.
"""


class LmpackError(Exception):
    """Base of every error a user can cause or meet; the message is one line."""

    exit_code = 1


class UsageError(LmpackError, ValueError):
    """A flag, argument or parameter that cannot mean anything."""

    exit_code = 2


class CheckpointError(LmpackError, ValueError):
    """The source checkpoint is broken, incomplete or contradicts itself."""


class PackError(LmpackError, ValueError):
    """The pack's files are not what its manifest says."""


class ManifestError(PackError):
    """The manifest is missing, malformed, or of another version."""


class ProfileError(LmpackError, ValueError):
    """A routing profile or trace is broken, of another version, or does not fit the one beside it."""


class UnsupportedError(LmpackError, NotImplementedError):
    """Sound input that this version of lmpack cannot handle."""


class BudgetError(LmpackError, MemoryError):
    """The memory budget is smaller than the smallest that works; the message names that one."""


class StorageError(LmpackError, OSError):
    """The drive refused: no space or inodes, read-only, or a read that failed."""
