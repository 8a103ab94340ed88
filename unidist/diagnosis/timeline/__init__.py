"""One timeline of all ranks: what each waits for, when, and for whom."""
