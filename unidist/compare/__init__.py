"""What ``unidist compare`` runs in the ranks, and what it makes of their records."""
