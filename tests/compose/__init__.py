"""The files of compose/: what they say is right, and what they start works, also where there is no Docker."""
