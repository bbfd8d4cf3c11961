"""Every failure that a caller may want to catch.

Flow:   [errors] -> plan -> order -> sources -> ...
Owns:   the exception classes.
Leaves: raising them (all other files).

    FeedError
    +-- SourceError    (also a ValueError)    the data, or how it was handed over
    +-- StrategyError  (also a ValueError)    devices, strategies, models that cannot be moved
    +-- WorkerError    (also a RuntimeError)  worker processes

An exception that the user's own code raises is never wrapped: it reaches `fit` as it was raised.
"""


class FeedError(Exception):
    """Base of every error that keras_gpufeed raises on its own account."""


class SourceError(FeedError, ValueError):
    """The data cannot be fed: wrong lengths, types, shapes, or a wrong combination of arguments."""


class StrategyError(FeedError, ValueError):
    """A device, a strategy or a model does not fit the others."""


class WorkerError(FeedError, RuntimeError):
    """A worker process failed and could not be replaced."""
