"""What ``unidist bench`` measures: each suite is a module whose ``cases`` run inside a world, on every rank."""
