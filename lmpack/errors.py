"""The errors lmpack raises on purpose; anything else is a bug and may show a traceback.

LmpackError                 exit code 1
├── UsageError              exit code 2: what the user gave cannot work: a flag, a path, a text, some prompts, a limit
├── CheckpointError         a source GGUF or safetensors is broken, incomplete or lies
│   └── SourceChangedError  it is there no longer, or changes while it is converted
├── PackError               a pack is broken
│   └── ManifestError       its manifest.json cannot be trusted
├── ProfileError            a routing profile or trace is broken, or does not fit another one
├── UnsupportedError        sound input that this version cannot run (architecture, dtype, pre-tokenizer)
├── BudgetError             a memory budget below what the model needs; names the smallest that works
├── StorageError            the drive refused: no space, no inodes, read-only, a read that failed
└── HubError                the hub refused, failed, or gave something else than was asked for

Exit code 2 asks for another command line, or for another text where it names one; 1 says that the command line was
fine, and that a model, a pack, a profile, the drive or the memory failed, or was found damaged.
A message says where, what, what was expected, and what to do.
"""


class LmpackError(Exception):
    """Base of every error a user can cause or meet; the message is one line."""

    exit_code = 1


class UsageError(LmpackError, ValueError):
    """What the user gave cannot work: a flag, an argument, a parameter, a text."""

    exit_code = 2


class CheckpointError(LmpackError, ValueError):
    """The source checkpoint is broken, incomplete or contradicts itself."""


class SourceChangedError(CheckpointError):
    """The source is there no longer, or changes while it is converted."""


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


class HubError(LmpackError, OSError):
    """The hub cannot be reached, refuses, or gives something else than it promised."""
