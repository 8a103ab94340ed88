"""Starting worlds on this host, each with the launcher's own program.

A launcher has the name that ``topology().launcher`` has in the ranks that it starts.
"""
