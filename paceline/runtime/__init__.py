"""Process plumbing that every service shares."""
