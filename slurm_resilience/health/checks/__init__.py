"""One check a file; each defines ``CHECK``."""
