"""How a process was started and what it finds around it."""
