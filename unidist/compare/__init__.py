"""``unidist compare``: the recorder that runs in the ranks, and the comparison of the records."""
