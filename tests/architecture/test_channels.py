"""Who opens connections: few, so that none forgets to prove who it is, or to encrypt."""

import ast

from tests.architecture.documents import ROOT
from tests.architecture.names import package_files, tree_of

# Calls between our processes, a user's client, and questions about health, which are open to all.
OPENERS = {
    "paceline/runtime/membership.py",
    "paceline/client_channel.py",
    "paceline/health.py",
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


def test_the_limit_of_a_message_is_raised_for_clients_alone() -> None:
    """Between processes every message stays within what gRPC takes by default; only a router's public door takes more, to say why not."""
    named = {
        str(path.relative_to(ROOT))
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and node.value in {"grpc.max_receive_message_length", "grpc.max_send_message_length"}
    }
    raised = {
        str(path.relative_to(ROOT))
        for path in package_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.keyword) and node.arg == "max_receive_bytes"
    }
    assert named == {"paceline/runtime/server.py"}
    assert raised == {"router/server.py"}
