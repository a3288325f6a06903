"""The main job on a lab, timed: a training loses a node (or a rank) and goes on."""
