"""``unidist run``: start a world on this and other hosts, with horovodrun's options.

The driver, which the user calls, starts an agent on each host; the agent starts that host's ranks.
"""
