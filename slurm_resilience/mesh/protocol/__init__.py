"""The protocol that the processes of a training agree by. Pure: no socket, clock or thread."""
