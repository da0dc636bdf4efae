"""For processors: C++ without torch's headers, which a compiler of the machine builds in seconds."""
