"""Pictures of programs: timelines and coverage, simulated or recorded."""
