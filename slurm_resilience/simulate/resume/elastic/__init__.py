"""A simulated elastic step, which grows by companions and shrinks without them."""
