"""Short measures of speed over time: who falls behind its own and its peers'."""
