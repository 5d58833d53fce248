"""narrowgate inside other people's training loops; each trainer has a module of its own, imported by name."""

from narrowgate.integrations.narrowing import Narrowed, Settings

__all__ = ["Narrowed", "Settings"]
