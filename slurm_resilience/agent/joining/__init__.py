"""The lifecycle scripts of a node that is about to join, as its sresd sees them."""
