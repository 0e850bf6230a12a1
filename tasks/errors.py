"""Every error that drafthouse raises on purpose.

DrafthouseError              one clear line: what, where, what to do
├── ConfigError              a campaign file or override is wrong (names the path in the config)
├── InputError               a prompts file, model folder or import is wrong (names file and rows)
├── StoreError               a table or artifact cannot be written or read
│   ├── SchemaMismatch       written by a newer or unknown schema
│   └── ArtifactDamaged      manifest and files disagree
├── MachineError             the host stops us
│   ├── PortTaken
│   ├── ForeignHolder        somebody else's process holds a GPU that we need
│   ├── WedgedGpu            memory or load without a process: an operator has to look
│   └── Survivor             a process of ours outlived TERM and KILL
├── EngineError              a server does not do what it was started for
│   ├── LaunchFailed         exited while loading, or never became ready
│   ├── NotSupported         this engine, model class or setting cannot do that
│   └── ServerLost           it answered before and does not now
├── MeasurementInvalid       numbers exist but must not be used
└── SeamMismatch             two stages disagree: the reason why drafthouse exists
    ├── SettingsMismatch     requested and effective settings differ
    ├── AlignmentMiss        captured states are not the target's states
    ├── OffPolicy            responses are not the target's own text
    ├── ExportMismatch       a drafter folder is not what was trained
    ├── CaptureLost          a sample was asked for and its states never came
    └── DrafterBroken        the drafter does not draft
"""

from __future__ import annotations


class DrafthouseError(Exception):
    """Base of all; the command line prints its text as one line and exits 1."""


class ConfigError(DrafthouseError, ValueError):
    """The message starts with the dotted path of the field."""


class InputError(DrafthouseError, ValueError):
    """A file from the user cannot be used as it is."""


class StoreError(DrafthouseError):
    """A table or artifact cannot be written or read."""


class SchemaMismatch(StoreError):
    """The table on disk follows a schema that this version does not know."""


class ArtifactDamaged(StoreError):
    """Manifest and files disagree, so the artifact is not reused."""


class MachineError(DrafthouseError):
    """The host is not in a state in which a campaign may run."""


class PortTaken(MachineError):
    """The port belongs to a process that this tool did not start."""


class ForeignHolder(MachineError):
    """A needed GPU is held by a process that is not ours."""


class WedgedGpu(MachineError):
    """GPU memory or load without a visible process; never reset automatically."""


class Survivor(MachineError):
    """A process of ours outlived SIGTERM and SIGKILL."""


class EngineError(DrafthouseError):
    """A server does not do what it was started for."""


class LaunchFailed(EngineError):
    """Carries the exit code and the last log lines in its text."""


class NotSupported(EngineError):
    """Refused before loading, with the reason and the remedy."""


class ServerLost(EngineError):
    """A server that was ready does not answer any more."""


class MeasurementInvalid(DrafthouseError):
    """A measurement ran but its numbers must not be used."""


class SeamMismatch(DrafthouseError):
    """Two stages disagree about what passes between them."""


class SettingsMismatch(SeamMismatch):
    """`setting: asked X, got Y (source)`."""


class AlignmentMiss(SeamMismatch):
    """Names the point that missed and the index that it really is."""


class OffPolicy(SeamMismatch):
    """Mean NLL per token of the responses does not fit the target and its sampling."""


class ExportMismatch(SeamMismatch):
    """Names the tensor that is missing, unexpected or of the wrong shape."""


class CaptureLost(SeamMismatch):
    """Names the sample keys that were never acknowledged."""


class DrafterBroken(SeamMismatch):
    """Accept length says that no draft token is ever accepted."""
