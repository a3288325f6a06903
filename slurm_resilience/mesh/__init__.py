"""What the processes of one training know of each other: who lives, which generation, its keys.

No torch in here: the launcher and the supervisor look in as well.
"""
