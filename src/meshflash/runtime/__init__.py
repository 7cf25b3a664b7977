"""How a process was started: launchers, rendezvous, devices, logs."""
