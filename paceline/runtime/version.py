"""The version of this installation."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("paceline")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "unknown"
