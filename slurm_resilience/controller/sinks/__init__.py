"""Events that leave sresctld: to a web address, a command or a file of the site's choice.

The cycle writes events into the journal and knows nothing of sinks. Each sink has a thread that
reads the journal from where the sink stands, sends, and remembers in a file of its own how far it
came. So a sink that hangs stops neither the cycle nor another sink, and an event reaches it at
least once.
"""
