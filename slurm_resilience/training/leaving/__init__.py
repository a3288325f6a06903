"""Leave a training, or end it, between two steps, on request."""
