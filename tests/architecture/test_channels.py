"""Who opens connections: few, so that none forgets to prove who it is, or to encrypt."""

import ast

from tests.architecture.documents import ROOT
from tests.architecture.names import package_files, tree_of

# Calls between our processes, a user's client, and the launcher's question about health, which is open to all.
OPENERS = {
    "paceline/runtime/membership.py",
    "paceline/client_channel.py",
    "paceline/launcher/probes.py",
}


def test_connections_are_opened_in_few_places() -> None:
    """Everybody else asks Channels, whose calls prove membership, or is a client."""
    found = {
        str(path.relative_to(ROOT))
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in {"insecure_channel", "secure_channel"}
    }
    assert found == OPENERS
