"""Several gateway processes: the control process starts, watches and ends workers, each with its own port and turns."""
