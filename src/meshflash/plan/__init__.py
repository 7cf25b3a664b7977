"""Plans: what programs will do before any device runs them, as times and as pictures."""
