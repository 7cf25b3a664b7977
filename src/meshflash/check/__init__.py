"""Is it right on this machine? Every schedule, layout, mask and feature over ranks, against the oracle in float64."""
