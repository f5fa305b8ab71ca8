"""The session: settings of a command from files and variables, where the command line does not give them."""

from maniple.session.command import Configured

__all__ = ["Configured"]
