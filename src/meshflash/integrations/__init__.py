"""Other projects' calling conventions, served by meshflash."""
