"""attnlib within other libraries, each of which is imported by its own module alone."""
