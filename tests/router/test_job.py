"""One request on its way."""

from router.job import SESSION_ID, session_id_of


def test_a_session_is_named_in_the_metadata() -> None:
    """Other entries do not matter; without one, or with bytes, there is no session."""
    assert session_id_of((("user-agent", "x"), (SESSION_ID, "chat 7"))) == "chat 7"
    assert session_id_of((("user-agent", "x"),)) == ""
    assert session_id_of(((SESSION_ID, b"chat 7"),)) == ""
    assert session_id_of(None) == ""
