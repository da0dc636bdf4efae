"""One request on its way."""

import pytest

from paceline.core.errors import BadFieldError
from router.job import SESSION_ID, session_id_of


def test_a_session_is_named_in_the_metadata() -> None:
    """Other entries do not matter; without one, or with bytes, there is no session."""
    assert session_id_of((("user-agent", "x"), (SESSION_ID, "chat 7"))) == "chat 7"
    assert session_id_of((("user-agent", "x"),)) == ""
    assert session_id_of(((SESSION_ID, b"chat 7"),)) == ""
    assert session_id_of(None) == ""


def test_a_session_has_a_name_of_bounded_length() -> None:
    """What is longer is refused by the name of the metadata, and not cut."""
    assert session_id_of(((SESSION_ID, "x" * 256),)) == "x" * 256
    with pytest.raises(BadFieldError) as caught:
        session_id_of(((SESSION_ID, "x" * 257),))
    assert caught.value.facts() == {"field": "paceline-session-id"}
