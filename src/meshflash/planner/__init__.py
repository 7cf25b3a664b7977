"""What a schedule costs on a machine: timelines, and the simulation of programs. Imports no torch."""
