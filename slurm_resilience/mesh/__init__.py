"""The connections of one training: living processes, generations, and their keys.

No torch in here: the launcher and the supervisor look in as well.
"""
