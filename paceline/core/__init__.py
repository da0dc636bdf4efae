"""Words and rules; standard library only."""
