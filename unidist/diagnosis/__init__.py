"""What each rank does: reports, timelines."""
