"""Steps that tasks report, and what follows where none comes any more: a hang, or a slow node."""
