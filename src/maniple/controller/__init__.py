"""The controller: answers the workers' questions. `controller` is the class to derive from, `process` serves it."""

from maniple.controller.controller import Controller

__all__ = ["Controller"]
