"""What a graph assumed of Python, held while it is traced and compared at every call."""
