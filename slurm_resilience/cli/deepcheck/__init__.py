"""`sres deepcheck`."""
