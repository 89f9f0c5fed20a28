"""The one version of this project, read by packaging, the client and every rank."""

__version__ = "1.16.0"
