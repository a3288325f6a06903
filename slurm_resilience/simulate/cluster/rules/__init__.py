"""The rules that must hold in a simulated cluster, and what they remember."""
