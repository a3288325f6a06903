"""Have deep checks run when they are due, and clear up behind those that were killed."""
