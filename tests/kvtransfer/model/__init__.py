"""The hand-over's protocol as a specification that can be explored; start reading at words.py."""
