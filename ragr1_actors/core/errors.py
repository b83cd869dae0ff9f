"""All exceptions that the project raises on purpose.

::

    RagR1Error
    ├── UserError                  what was asked for cannot be done; one sentence, exit status 2
    │   ├── ConfigError (ValueError)   unknown key, wrong type, unknown recipe
    │   ├── DataError (ValueError)     a task, corpus or index file that cannot be used
    │   └── RunDirectoryError          the run directory holds a run already, or holds none
    ├── RetrievalError             a search failed on every replica
    ├── RpcError                   a remote call to an actor failed
    ├── TransferError              weights did not get from the learner to an engine
    ├── EngineError                an engine did not start or did not answer
    │   └── EngineDeadError            it will not answer any more
    ├── LearnerError               learning cannot go on
    └── FleetError                 no actor of a fleet is left

All of them pickle (Ray sends them between processes): they take one message and keep no other state.
"""

from __future__ import annotations


class RagR1Error(Exception):
    """Base of every exception raised on purpose."""


class UserError(RagR1Error):
    """A request that cannot be met. The message says what was got, what was expected and what to do."""


class ConfigError(UserError, ValueError):
    """A recipe, a section, a key or a value that does not exist or does not fit."""


class DataError(UserError, ValueError):
    """A task file, a corpus or an index that cannot be used as it is."""


class RunDirectoryError(UserError):
    """A run directory that holds a run already, or that holds none where one is needed."""


class RetrievalError(RagR1Error):
    """A search that failed on every replica it was tried on."""


class RpcError(RagR1Error):
    """A remote call to an actor failed: no connection, or the method raised; the message has the cause."""


class TransferError(RagR1Error):
    """Weights that did not arrive, or only in part; the engine needs all of them again."""


class EngineError(RagR1Error):
    """An engine that did not start or did not answer."""


class EngineDeadError(EngineError):
    """An engine whose process has ended: it answers no further request."""


class LearnerError(RagR1Error):
    """Learning that cannot go on: no step changes the weights any more."""


class FleetError(RagR1Error):
    """A fleet without any live actor."""
