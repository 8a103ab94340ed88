"""What each rank does, for errors, for reports of operations that do not complete, and for ``unidist where``.

Each rank has a small server. Ranks ask each other only when something does not go on.
"""
